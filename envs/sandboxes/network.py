"""The one way out of a sandbox: an HTTP proxy on the owner's side that knows which hosts may be reached.

Invariant: a connection goes out only to a host that is on the list by the name it was asked for, so a bare address goes
nowhere unless it is listed; and where any host may be reached ("*"), only to addresses of the public internet, never to
the owner's machine or its neighbours. The sandbox itself has no network: it reaches this listener and nothing else.
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

PORT = 3128  # of the proxy, as a sandbox sees it
_URL = f"http://127.0.0.1:{PORT}"
VARIABLES = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL)
"""What makes curl, git, pip and most libraries in a sandbox use the proxy."""
VARIABLES |= dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1")

_HEAD = 64 * 2**10  # bytes of a request before its body
_CONNECTIONS = 64  # of one sandbox at once; each holds two descriptors of ours
_PATIENCE = 30.0  # seconds for a request to arrive and for a host to answer
_IDLE = 600.0  # seconds that a connection may rest
_NETWORK = 0x40000000  # CLONE_NEWNET
_TOLD = 100  # refusals that are logged; the rest is counted

_log = logging.getLogger(__name__)


def listen_inside(pid: int, port: int = PORT) -> socket.socket:
    """For `Proxy.serve`: a listener on the loopback of the network in which a process lives (a container's first, say).

    OSError (EPERM) unless we may enter it, which takes root.
    """

    def enter() -> socket.socket:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
        finally:
            os.close(namespace)
        listener = socket.socket()
        listener.bind(("127.0.0.1", port))
        listener.listen(_CONNECTIONS)
        return listener

    with ThreadPoolExecutor(1) as thread:  # a thread enters alone, and this one never comes back
        return thread.submit(enter).result()


class Refused(Exception):
    """The request's answer, which is an HTTP status and a reason."""


class Proxy:
    """Serves CONNECT (https) and plain http on any listening socket, of a unix path or of a sandbox's own loopback."""

    def __init__(self, hosts: Sequence[str]):
        self._hosts = frozenset(host.lower() for host in hosts)
        self.refused: Counter[str] = Counter()
        """Hosts that were asked for in vain."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Start; the socket is the proxy's from now on."""
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        self._server = await start(self._accept, sock=listener, limit=_HEAD)

    def close(self) -> None:
        """Cut all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except Refused as refusal:
            status, _, reason = str(refusal).partition(": ")
            body = f"sandbox: {reason}\n".encode()
            head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("a connection of a sandbox ended: %r", error)
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) > _CONNECTIONS:
            raise Refused(f"503 Service Unavailable: more than {_CONNECTIONS} connections at once")
        async with asyncio.timeout(_PATIENCE):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, host, port, onward = _parse(head)
        self._check(host)
        try:
            async with asyncio.timeout(_PATIENCE):
                there = await self._connect(host, port)
        except (OSError, TimeoutError) as error:
            raise Refused(
                f"502 Bad Gateway: {host}:{port} cannot be reached: {error or 'it does not answer'}"
            ) from None
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                there[1].write(onward)
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
        finally:
            there[1].close()

    def _check(self, host: str) -> None:
        if host in self._hosts or "*" in self._hosts:
            return
        self._refuse(host, f"{host} is not on the list of hosts that may be reached ({', '.join(sorted(self._hosts))})")

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Looked up once, so that it cannot be elsewhere by the time we connect."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if host not in self._hosts and not all(ipaddress.ip_address(address).is_global for address in addresses):
            self._refuse(host, f"{host} is not on the public internet ({', '.join(addresses)})")
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, port, limit=_HEAD)
        return await asyncio.open_connection(addresses[-1], port, limit=_HEAD)

    def _refuse(self, host: str, reason: str) -> None:
        if host not in self.refused and len(self.refused) < _TOLD:
            _log.warning("refused to a sandbox: %s", reason)
        if host in self.refused or len(self.refused) < _TOLD:
            self.refused[host] += 1
        raise Refused(f"403 Forbidden: {reason}")


def _parse(head: str) -> tuple[str, str, int, bytes]:
    """Method, host, port, and the request as the host itself wants it."""
    request, *lines = head.split("\r\n")
    try:
        method, target, version = request.split(" ")
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = (url.hostname or "").rstrip("."), url.port or (443 if method == "CONNECT" else 80)
    except ValueError:
        raise Refused("400 Bad Request: not a request that a proxy understands") from None
    if not host or (method != "CONNECT" and url.scheme != "http"):
        raise Refused("400 Bad Request: a proxy is asked for http://host/path, or to CONNECT host:port")
    own = ("host", "connection", "keep-alive")
    kept = [line for line in lines if line and not line.lower().startswith(("proxy-", *(f"{name}:" for name in own)))]
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    named = url.netloc.rpartition("@")[2]
    onward = [f"{method} {path} {version}", f"Host: {named}", *kept, "Connection: close", "", ""]
    return method, host, port, "\r\n".join(onward).encode("latin-1")


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until the source ends, which the sink is told."""
    while True:
        async with asyncio.timeout(_IDLE):
            chunk = await source.read(1 << 16)
        if not chunk:
            break
        sink.write(chunk)
        async with asyncio.timeout(_IDLE):
            await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()
