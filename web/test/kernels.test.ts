// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";
import type { KernelRow } from "../src/api";
import { kernelsCsv, matching, shortKernel } from "../src/kernels";
import { stepOf, ticks } from "../src/ticks";

const SUM = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)";
const ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >(int)";
const GEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(cutlass_80_simt_sgemm_128x256_8x4_nt_align1::Params)";
const row = (name: string, ns = 1): KernelRow => ({ kind: "kernel", name, runs: 2, ns, mean_ns: 1, most_ns: 1, timed: 1 });

describe("kernels", () => {
  it("have short names that distinguish them", () => {
    expect([SUM, ADAM, GEMM, "sm80_xmma_gemm_f32", "(copy h2d)", "a<b", "void at::native::multi_tensor_apply_kernel<BinaryOpScalarFunctor<float>, std::multiplies<float> >(int)"].map(shortKernel)).toEqual([
      "reduce_kernel sum_functor", "multi_tensor_apply_kernel FusedAdamMathFunctor", "cutlass_80_simt_sgemm_128x256_8x4_nt_align1", "sm80_xmma_gemm_f32", "(copy h2d)", "a", "multi_tensor_apply_kernel BinaryOpScalarFunctor multiplies",
    ]);
  });

  it("are found by their whole name, too", () => {
    expect(matching([row(SUM), row(ADAM)], " TensorIterator ").map(({ name }) => name)).toEqual([SUM]);
    expect(matching([row(SUM), row(ADAM)], "")).toHaveLength(2);
  });

  it("are saved with names as text", () => {
    expect(kernelsCsv([row('=HYPERLINK("x")', 7)]).split("\n")[1]).toBe(`"'=HYPERLINK(""x"")","kernel",7,2,1,1`);
  });
});

describe("ticks", () => {
  it("are round, and reach both ends", () => {
    const origin = 1795312800; // 08:00:00 with this zone
    expect(ticks(origin, origin + 10, 8, 0).map(({ text }) => text.slice(-2))).toEqual(["00", "02", "04", "06", "08", "10"].map((one) => one));
    expect(ticks(origin, origin + 10, 8, 0).map(({ at }) => at)).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
    expect(ticks(origin + 0.2971, origin + 0.4031, 8, 0).map(({ text }) => text.slice(-4))).toEqual(["0.30", "0.32", "0.34", "0.36", "0.38", "0.40"]);
    expect(ticks(5, 5, 8)).toEqual([]);
  });

  it("have steps of clocks from a second on", () => {
    expect([0.7, 9, 61, 700, 100_000].map((length) => stepOf(length, 8))).toEqual([0.1, 2, 10, 120, 14_400]);
    expect(stepOf(0.0003, 8)).toBeCloseTo(0.000_05, 9);
  });
});
