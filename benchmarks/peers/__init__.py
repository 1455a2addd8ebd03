"""What a user would pick instead; each library is imported when its call is made, not before."""

DISTRIBUTIONS = {
    "sdpa-cudnn": "torch",
    "sdpa-flash": "torch",
    "flex": "torch",
    "kernel[grid]": "triton",
    "torch": "torch",
    "attncc-bf16": "attncc",
    "fla": "fla-core",
    "flashinfer": "flashinfer-python",
}
"""Each peer's name, and the distribution whose version a row records."""
