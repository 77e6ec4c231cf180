"""Arguments that make recipes small."""

SMALL_DLRM = [
    *("--embedding-dim", "4", "--dense-arch", "8", "4", "--over-arch", "8", "1"),
    *("--num-cross-layers", "2", "--low-rank", "2", "--max-table-rows", "50"),
]
SMALL_CTR = [
    *("--embedding-dim", "4", "--layer-sizes", "8", "--batch-size", "64"),
    *("--max-epochs", "2", "--seeds", "1", "2"),
]
