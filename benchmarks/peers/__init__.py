"""What a user would pick instead; each library is imported when its call is made, not before."""

DISTRIBUTIONS = {
    "sdpa-cudnn": "torch",
    "sdpa-flash": "torch",
    "flex": "torch",
    "kernel[grid]": "triton",
    "torch": "torch",
    "torch eager": "torch",
    "torch gather": "torch",
    "torch conv1d": "torch",
    "sdpa": "torch",
    "torch.compile": "torch",
    "attncc-bf16": "attncc",
    "attncc dense cache": "attncc",
    "fla": "fla-core",
    "fla recurrent": "fla-core",
    "flashinfer": "flashinfer-python",
    "flashinfer uncut": "flashinfer-python",
    "flashinfer-fa3": "flashinfer-python",
    "flashinfer-fa3 and bmm": "flashinfer-python",
}
"""Each peer's name, and the distribution whose version a row records."""
