"""A node without HTTP, until its standard input ends: `python program.py SETTINGS`, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from tandem.cluster.node import Node
from tandem.config import Settings


async def main() -> None:
    node = Node(Settings.model_validate_json(sys.argv[1]))
    await node.start()
    print(json.dumps({"node_id": node.node_id}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.stop()


asyncio.run(main())
