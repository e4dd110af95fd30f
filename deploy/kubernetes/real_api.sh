#!/usr/bin/env bash
# Builds and starts a real API server for `make test-k8s` (Debian 12, root or sudo, about 15 minutes once, 2 GB of disk):
#   deploy/kubernetes/real_api.sh FOLDER        then, as it prints,  REFLUX_KUBE_API=... make test-k8s
# Debian's source of Kubernetes 1.20.2 is the newest that builds with Debian's own Go: no DRA, no scheduling gates, no
# probes by gRPC. Custom kinds are defined by the tests without their controllers, so no pod ever runs.
set -euo pipefail
folder=${1:?usage: real_api.sh FOLDER}
mkdir -p "$folder" && cd "$folder"
folder=$PWD
server=$folder/kube-apiserver

if [ ! -x "$server" ]; then
  apt-get install -y -q --no-install-recommends etcd-server golang-1.19-go rsync dpkg-dev golang-github-modern-go-reflect2-dev
  apt-get source -q --download-only kubernetes
  rm -rf source && dpkg-source -x kubernetes_*.dsc source
  # The vendored reflect2 crashes with Go 1.18 and newer at the first list (aeshashbody): take Debian's 1.0.2.
  rm -rf source/vendor/github.com/modern-go/reflect2
  cp -rL /usr/share/gocode/src/github.com/modern-go/reflect2 source/vendor/github.com/modern-go/reflect2
  mkdir -p gopath/src/k8s.io && ln -sfn "$folder/source" gopath/src/k8s.io/kubernetes
  export GOPATH=$folder/gopath GO111MODULE=off CGO_ENABLED=0 PATH=/usr/lib/go-1.19/bin:$PATH
  cd gopath/src/k8s.io/kubernetes
  nice make WHAT=cmd/kube-apiserver GOFLAGS=-v || true # for the generated code; its own link step may fail
  nice go build -o "$server" k8s.io/kubernetes/cmd/kube-apiserver
  cd "$folder"
fi

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
etcd=$(port) peer=$(port) api=$(port)
token=$(python3 -c 'import secrets; print(secrets.token_hex(16))')
umask 077
printf '%s' "$token" >token && printf '%s,admin,admin,system:masters\n' "$token" >tokens.csv
[ -f sa.key ] || openssl genrsa -out sa.key 2048 2>/dev/null
data=$(mktemp -d "$folder/etcd.XXXX")
etcd --data-dir "$data" --unsafe-no-fsync --listen-client-urls "http://127.0.0.1:$etcd" --advertise-client-urls "http://127.0.0.1:$etcd" \
  --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
  --initial-cluster "default=http://127.0.0.1:$peer" >etcd.log 2>&1 &
pids=$!
trap 'kill $pids 2>/dev/null; wait; rm -rf "$data"' EXIT
"$server" --etcd-servers="http://127.0.0.1:$etcd" --bind-address=127.0.0.1 --secure-port="$api" --cert-dir="$folder/certs" \
  --token-auth-file=tokens.csv --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount \
  --service-account-issuer=https://reflux.test --service-account-key-file=sa.key --service-account-signing-key-file=sa.key >api.log 2>&1 &
pids="$pids $!"
for _ in $(seq 300); do
  curl -sk -H "Authorization: Bearer $token" "https://127.0.0.1:$api/readyz" | grep -qx ok && break
  sleep 0.2
done
curl -sk -H "Authorization: Bearer $token" "https://127.0.0.1:$api/readyz" | grep -qx ok || { tail -5 api.log >&2; exit 1; }
echo "REFLUX_KUBE_API=https://127.0.0.1:$api REFLUX_KUBE_TOKEN_FILE=$folder/token REFLUX_KUBE_CA_FILE=$folder/certs/apiserver.crt make test-k8s"
echo "Ctrl-C ends the server." >&2
wait
