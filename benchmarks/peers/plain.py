"""Plain PyTorch: one process, one thread, no group; it keeps freed memory, as raydl's workers do.

python -m benchmarks.peers.plain --model lenet --samples 60000 --lr 0.1 --result FILE
"""

from __future__ import annotations

from benchmarks.peers.loop import Run, parser_of, read_data, settings_of, unwrapped
from raydl.ray_backend.actors import keep_freed_memory


def main() -> None:
    """Train in this process."""
    parser = parser_of(__doc__)
    settings = settings_of(parser, parser.parse_args())
    keep_freed_memory()
    Run(settings, read_data(settings), wrap=unwrapped).train()


if __name__ == "__main__":
    main()
