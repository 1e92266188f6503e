"""Coroutines in ranks, and a caller that awaits several runs at once."""

import asyncio

from serverless_gpu import distributed


async def fetch(number):
    await asyncio.sleep(0.01)
    return number + 1


@distributed(gpus=1, gpu_type="CPU", quiet=True)
def work(start):
    async def main():
        process = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        values = await asyncio.gather(*(fetch(number) for number in range(start, start + 3)))
        return out.decode().strip(), values, await asyncio.to_thread(sum, values)

    return asyncio.run(main())


async def main():
    loop = asyncio.get_running_loop()
    runs = [work.submit(start) for start in (0, 10)]
    return await asyncio.gather(*(loop.run_in_executor(None, run.result) for run in runs))


if __name__ == "__main__":
    results = asyncio.run(main())
    assert results == [("hello", [1, 2, 3], 6), ("hello", [11, 12, 13], 36)], results
    print("done")
