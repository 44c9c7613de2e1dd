"""Methods of fake services that take a stream and answer once, as `outrider.transport.uploads` calls them."""

import asyncio
import functools


class Upload:
    """A call in progress. answer: a coroutine function of the stream."""

    def __init__(self, answer):
        self._requests = asyncio.Queue(1)
        self._answer = asyncio.ensure_future(answer(self._stream()))

    async def _stream(self):
        while (request := await self._requests.get()) is not None:
            yield request

    async def write(self, request):
        put = asyncio.ensure_future(self._requests.put(request))
        await asyncio.wait({put, self._answer}, return_when=asyncio.FIRST_COMPLETED)

    async def done_writing(self):
        await self.write(None)

    async def initial_metadata(self):
        await asyncio.wait({self._answer})

    def cancel(self):
        self._answer.cancel()

    def __await__(self):
        return self._answer.__await__()


def takes_upload(method):
    """The method of a fake, which takes the stream, as that of a stub."""

    @functools.wraps(method)
    def called(fake, **options):
        return Upload(functools.partial(method, fake, **options))

    return called
