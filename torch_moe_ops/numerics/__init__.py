"""Element formats, packing, block scales and quantizers, in plain torch on any device.

Values: `e2m1`, `e4m3`, `e8m0`, `fp6`. Formats made of them: `nvfp4`, `mx`, `fp8`, `int8`, `int4`.
`swizzle` is the 128x4 tiling of block scales. Nothing here depends on the rest of the package.

Every quantizer is a fixed sequence of IEEE-754 float32 operations, so that its bits do not depend on
the device; where a rounding order matters, the docstring gives it. Quantizers do not record gradients.
"""
