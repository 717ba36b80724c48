"""The forms of INT4 that are timed and measured: what shares a scale, of which dtype, with zero points or without."""

from typing import NamedTuple


class Form(NamedTuple):
    """group: values of K that share a scale, 0: a row. dtype: of the scales."""

    group: int
    dtype: str = "bfloat16"
    zero: bool = False

    @property
    def bits(self):
        """of a weight with its share of a scale and a zero point"""
        each = {"float32": 32}.get(self.dtype, 16) + (4 if self.zero else 0)
        return 4 + (each / self.group if self.group else 0)

    @property
    def weight_scales(self):
        """as moe.Problem says it"""
        return f"{self.dtype} per {self.group or 'row'}{' with zero points' if self.zero else ''}"


# As GPTQ and AWQ write them: float16.
FORMS = {
    "int4": Form(128),
    "int4g32": Form(32),
    "int4zp": Form(128, zero=True),
    "int4f16": Form(128, "float16"),
    "int4zpf16": Form(128, "float16", True),
    "int4g32zp": Form(32, zero=True),
    "int4g32f16": Form(32, "float16"),
    "int4g32zpf16": Form(32, "float16", True),
    "int4g64": Form(64),
    "int4g64zp": Form(64, zero=True),
    "int4g64f16": Form(64, "float16"),
    "int4g64zpf16": Form(64, "float16", True),
    "int4row": Form(0),
    "int4rowf16": Form(0, "float16"),
    "int4f32": Form(128, "float32"),
    "int4zpf32": Form(128, "float32", True),
}
