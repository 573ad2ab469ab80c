"""Dialects: thin translations of other systems' mixed-precision calls to mezzo.

One subpackage per system: `mezzo.compat.torch`, `apex`, `megengine`, `mxnet`, `oneflow` and
`paddle`. No other part of mezzo imports them.
"""
