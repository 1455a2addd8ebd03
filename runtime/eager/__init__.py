"""The torch lowering: every fold in vectorised eager form, on any device torch has.

It is the default where there is no GPU, and the eager reference of the numeric contract: fp32
accumulation, results rounded to their dtype once.
"""
