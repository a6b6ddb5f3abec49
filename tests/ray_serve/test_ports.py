"""An ingress does not share a port with Ray Serve's own proxy."""

import asyncio
import contextlib
import logging

import pytest
from aiohttp import web

from nanoactor.ray_serve.ports import avoid_proxy_port
from nanoactor.server.config import ServerConfig


@contextlib.asynccontextmanager
async def listening(path):
    """A server with one route; its port."""

    async def answer(request):
        return web.Response(text="success")

    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_proxys_port_is_left_to_it(host, caplog):
    async def main():
        async with listening("/-/healthz") as port:
            config = ServerConfig(host=host, port=port)
            with caplog.at_level(logging.WARNING, "nanoactor.ray"):
                chosen = (await avoid_proxy_port(config)).port
            assert chosen > port
            assert "Ray Serve's own proxy" in caplog.text

    asyncio.run(main())


def test_a_port_that_is_free_or_another_ingresses_is_taken(caplog):
    async def main():
        async with listening("/live") as port:
            assert (await avoid_proxy_port(ServerConfig(port=port))).port == port
        assert (await avoid_proxy_port(ServerConfig(port=port))).port == port
        assert (await avoid_proxy_port(ServerConfig(port=0))).port == 0
        assert caplog.text == ""

    asyncio.run(main())
