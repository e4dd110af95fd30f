"""The gRPC face of sessions: translates messages, delegates, holds no policy."""

from typing import Any

from reflux.sandbox.v1 import session_service_pb2 as pb
from reflux.sandbox.v1.session_service_pb2_grpc import SandboxSessionServiceServicer
from reflux_kit import telemetry
from reflux_sandbox.sessions import messages
from reflux_sandbox.sessions.registry import Sessions
from reflux_sandbox.sessions.session import Session
from reflux_sandbox.settings import SandboxSettings

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SandboxSessionService"].full_name


class SessionServicer(SandboxSessionServiceServicer):
    """See session_service.proto."""

    def __init__(self, settings: SandboxSettings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions

    def _session(self, name: str) -> Session:
        return self._sessions.get(messages.parse_name(name))

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Any) -> pb.CreateSessionResponse:
        request_id, run, limits = messages.parse_create(request, self._settings.child_memory_bytes)
        with telemetry.span("sandbox.session", run=run):
            session = await self._sessions.create(request_id, run, limits)
        return pb.CreateSessionResponse(session=messages.to_session(session))

    async def ExecSession(self, request: pb.ExecSessionRequest, context: Any) -> pb.ExecSessionResponse:
        session = self._session(request.name)
        code, seconds = messages.parse_exec(request, self._settings.most_run_seconds)
        with telemetry.span("sandbox.exec", run=session.run, session=session.name):
            return messages.to_exec_response(await session.exec(code, seconds))

    async def WriteSessionFile(self, request: pb.WriteSessionFileRequest, context: Any) -> pb.WriteSessionFileResponse:
        session, path = self._session(request.name), messages.parse_path(request.path)
        size = await session.write(path, messages.parse_data(request.data), append=request.append)
        return pb.WriteSessionFileResponse(size_bytes=size)

    async def ReadSessionFile(self, request: pb.ReadSessionFileRequest, context: Any) -> pb.ReadSessionFileResponse:
        session, path = self._session(request.name), messages.parse_path(request.path)
        data, size = await session.read(path, *messages.parse_range(request))
        return pb.ReadSessionFileResponse(data=data, size_bytes=size)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        await self._sessions.close(messages.parse_name(request.name))
        return pb.CloseSessionResponse()

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        return pb.GetSessionResponse(session=messages.to_session(self._session(request.name)))
