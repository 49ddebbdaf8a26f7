# SPDX-License-Identifier: Apache-2.0
"""Python over jaxlib: programs traced, compiled by LLVM in the same process, and run."""

import jax
import jax.numpy as jnp

A = jnp.ones((200, 200))


def step(x, scale):
    for _ in range(4):
        x = jnp.tanh(x @ A) * scale
    return jnp.linalg.norm(x)


def compiled(scale):
    return jax.jit(lambda x: step(x, scale))


def work():
    scale = 0.0
    while True:
        scale += 1.0
        run = compiled(scale)
        for _ in range(20):
            run(A).block_until_ready()


work()
