"""Rows in 8 bits an element, with a scale for each row."""

from torchembed.ops.row_codec.function import ScaledRows, decode_rows, encode_rows, scaled_rows

__all__ = ["ScaledRows", "decode_rows", "encode_rows", "scaled_rows"]
