"""What the tokenizer of a model may take is counted in its tenant's memory."""

import asyncio
from pathlib import Path

import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.config.text import TextOptions
from server.errors import MemoryFull, TooLarge
from server.link.blocks import BlockAllocator
from server.tenants.running_text import RunningText, open_text
from server.text.folder import TextFolder
from tests import encoders

SIGNATURE = Signature(
    (TensorSpec("input_ids", DATATYPES["INT64"], ("b", "n")),),
    (TensorSpec("last_hidden_state", DATATYPES["FP32"], ("b", "n", 4)),),
    max_batch=4,
)
LONG, MIB = "cat " * 10_000, 1 << 20


async def opened(root: Path) -> RunningText:
    encoders.write_tokenizer(root / "tokenizer.json")
    return await open_text(TextFolder(str(root / "tokenizer.json")), "m", SIGNATURE, 9, "", (0.0, ""))


async def test_a_text_needs_room_in_its_tenants_memory(tmp_path: Path) -> None:
    text = await opened(tmp_path)
    encoder, blocks = text.encoder(TextOptions(truncate=True)), BlockAllocator(64 * MIB, "tenants.acme.memory")
    with pytest.raises(TooLarge, match=r"need 12000000 bytes of memory; .*tenants\.acme\.memory"):
        await text.tokens([LONG], encoder, "input", BlockAllocator(8 * MIB, "tenants.acme.memory"))
    start, size = blocks.allocate(50 * MIB)
    with pytest.raises(MemoryFull, match=r"tenants\.acme\.memory"):
        await text.tokens([LONG], encoder, "input", blocks)
    assert len((await text.tokens(["cat"], encoder, "input", blocks))[0].ids) == 3
    blocks.free(start, size)
    assert len((await text.tokens([LONG], encoder, "input", blocks))[0].ids) == 512
    assert blocks.used == 0
    text.close()


async def test_requests_that_wait_for_one_tokenizer_need_the_room_of_the_largest(tmp_path: Path) -> None:
    text = await opened(tmp_path)
    encoder, blocks = text.encoder(TextOptions(truncate=True)), BlockAllocator(64 * MIB, "tenants.acme.memory")
    async with asyncio.TaskGroup() as group:
        for each in (LONG[:20_000], LONG, LONG, LONG[:20_000]):
            group.create_task(text.tokens([each], encoder, "input", blocks))
        await asyncio.sleep(0)
        assert 12_000_000 <= blocks.used < 18_000_000
    assert blocks.used == 0
    text.close()
