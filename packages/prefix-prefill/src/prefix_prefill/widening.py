"""Launches over an 8-bit cache that is widened before: into a workspace, by a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from kernel_reference.dispatch import fresh
from kernel_reference.integers import power_of_two_at_least
from kernel_reference.launching import Launch, Run
from prefix_prefill.addressing import Batch, Pages
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.kernels.widen import Strides, WidenConfig, widen
from prefix_prefill.merging.launch import Sized
from prefix_prefill.plan import PrefillPlan
from prefix_prefill.problem import WIDENED_PAGE, widened, widened_pages

Tensor = torch.Tensor
# What makes a launch that attends ready for one batch of a layer.
Make = Callable[[Batch, PrefillPlan, PrefillTensors, torch.device], Sized]


def with_widening(make: Make, first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Sized:
    """A launch that widens the cache of a batch, and those that attend to it."""
    problem = first.problem
    pages = [Pages.of(cache, problem.page_layout).strides for cache in (forms.k_cache, forms.v_cache)]
    # By page, token, head and element, of which all lie together.
    strides = Strides(*[(page, token, head, element) for page, token, head, _, element in pages])
    config = WidenConfig(
        D=problem.head_dim,
        BLOCK_D=power_of_two_at_least(problem.head_dim),
        DV=problem.head_dim_v,
        BLOCK_DV=power_of_two_at_least(problem.head_dim_v),
        PAGE=problem.page_size,
        WIDENED_PAGE=WIDENED_PAGE,
        HEADS_KV=problem.num_heads_kv,
    )

    def counts(batch: Batch) -> tuple[int, ...]:
        given = batch.problem
        return given.num_blocks, given.capacity, batch.s_table, widened_pages(given)[1]

    def grid(batch: Batch) -> tuple[int, int, int]:
        return prod(widened_pages(batch.problem)) * problem.num_heads_kv, 1, 1

    def sizes(batch: Batch) -> list[tuple[int, ...]]:
        pages = prod(widened_pages(batch.problem))
        return [(pages, problem.num_heads_kv, WIDENED_PAGE, size) for size in (problem.head_dim, problem.head_dim_v)]

    def held(batch: Batch) -> Batch:
        return Batch(widened(batch.problem), widened_pages(batch.problem)[1], batch.s_lse)

    k_form, v_form = (torch.empty(size, dtype=torch.float16, device="meta") for size in sizes(first))
    table_form = torch.empty((1, 1), dtype=torch.int32, device="meta")
    of_attention = forms._replace(k_cache=k_form, v_cache=v_form, block_table=table_form)
    first_held = held(first)
    attend = make(first_held, plan, of_attention, device)
    widening = Launch(widen, grid(first), (*counts(first), strides, config), device, num_warps=8)

    def sized(batch: Batch) -> Run:
        own = widening if batch is first else widening.resized(grid(batch), counts(batch))
        run_attend = attend(first_held if batch is first else held(batch))
        k_size, v_size = sizes(batch)
        table_size = widened_pages(batch.problem)

        def run(*tensors: Tensor | None) -> None:
            given = PrefillTensors(*tensors)  # type: ignore[arg-type]
            k, v = (fresh(size, dtype=torch.float16, device=device) for size in (k_size, v_size))
            table = fresh(table_size, dtype=torch.int32, device=device)
            own(given.k_cache, given.v_cache, given.block_table, given.seqlens_k, k, v, table)
            run_attend(*given._replace(k_cache=k, v_cache=v, block_table=table))

        return Run(run, lambda *_: False)

    return sized
