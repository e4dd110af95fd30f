#!/usr/bin/env bash
# Builds and starts a real API server for `make test-k8s` (Debian 12, dpkg-dev; no root; 3 GB of disk):
#   deploy/kubernetes/real_api.sh FOLDER        then, as it prints,  REFLUX_KUBE_API=... make test-k8s
# Debian's source of Kubernetes 1.20.2 is the newest that builds with Debian's own Go: no DRA, no scheduling gates, no
# probes by gRPC. Custom kinds are defined by the tests without their controllers, so no pod ever runs.
set -euo pipefail
folder=${1:?usage: real_api.sh FOLDER}
mkdir -p "$folder" && cd "$folder"
folder=$PWD
server=$folder/kube-apiserver etcd=$folder/root/usr/bin/etcd

fetch() { # Debian's packages, unpacked and not installed: an installed etcd would start as a service.
  apt-get -q download etcd-server golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
  for package in *.deb; do dpkg-deb -x "$package" root; done
  # The sources of packages are seldom set up: the configured ones again as such, with lists of their own.
  mkdir -p sources lists/partial
  sed 's/^Types: .*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >sources/debian.sources
  local options=(-q -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$folder/sources" -o "Dir::State::lists=$folder/lists")
  apt-get "${options[@]}" update
  apt-get "${options[@]}" source --download-only kubernetes
}

build() {
  local tree=$folder/gopath/src/k8s.io/kubernetes
  export GOPATH=$folder/gopath GOROOT=$folder/root/usr/lib/go-1.19 GO111MODULE=off CGO_ENABLED=0 GOCACHE=$folder/cache
  export PATH=$GOROOT/bin:$PATH
  rm -rf "$tree" && mkdir -p "${tree%/*}" && dpkg-source --no-check -x kubernetes_*.dsc "$tree"
  cd "$tree"
  # The vendored reflect2 crashes with Go 1.18 and newer at the first list (aeshashbody): take Debian's 1.0.2.
  rm -rf vendor/github.com/modern-go/reflect2
  cp -rL "$folder/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/reflect2
  # Of the generated code only this is not in the source; `make` would generate all of it anew.
  go build -o "$folder/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
  local packages
  packages=$(grep -RlE --include='*.go' '^ *// *\+k8s:openapi-gen=' cmd pkg vendor/k8s.io |
    grep -vE '^vendor/k8s.io/(code-generator|sample-apiserver|sample-controller)/|/kube-openapi/' | xargs -n1 dirname | LC_ALL=C sort -u)
  "$folder/openapi-gen" -i "$(sed 's#^#k8s.io/kubernetes/#' <<<"$packages" | paste -sd,)" -O zz_generated.openapi \
    -p k8s.io/kubernetes/pkg/generated/openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$folder/violations"
  go build -o "$server" k8s.io/kubernetes/cmd/kube-apiserver
  cd "$folder"
}

ls kubernetes_*.dsc >/dev/null 2>&1 || fetch
[ -x "$server" ] || build

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
client=http://127.0.0.1:$(port) peer=http://127.0.0.1:$(port) api=$(port)
token=$(python3 -c 'import secrets; print(secrets.token_hex(16))')
umask 077
printf '%s' "$token" >token && printf '%s,admin,admin,system:masters\n' "$token" >tokens.csv
[ -f sa.key ] || openssl genrsa -out sa.key 2048 2>/dev/null
data=$(mktemp -d "$folder/etcd.XXXX")
"$etcd" --data-dir "$data" --unsafe-no-fsync --listen-client-urls "$client" --advertise-client-urls "$client" --listen-peer-urls "$peer" \
  --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer" >etcd.log 2>&1 &
pids=$!
# At once: a server that is told to stop waits for its etcd, and neither has anything to keep.
trap 'kill -KILL $pids 2>/dev/null; wait; rm -rf "$data"' EXIT
"$server" --etcd-servers="$client" --bind-address=127.0.0.1 --secure-port="$api" --cert-dir="$folder/certs" \
  --token-auth-file=tokens.csv --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount \
  --service-account-issuer=https://reflux.test --service-account-key-file=sa.key --service-account-signing-key-file=sa.key >api.log 2>&1 &
pids="$pids $!"
ready() { curl -sk -H "Authorization: Bearer $token" "https://127.0.0.1:$api/readyz" | grep -qx ok; }
for _ in $(seq 300); do
  ready && break
  sleep 0.2
done
ready || { tail -5 api.log >&2; exit 1; }
echo "REFLUX_KUBE_API=https://127.0.0.1:$api REFLUX_KUBE_TOKEN_FILE=$folder/token REFLUX_KUBE_CA_FILE=$folder/certs/apiserver.crt make test-k8s"
echo "Ctrl-C ends the server." >&2
wait
