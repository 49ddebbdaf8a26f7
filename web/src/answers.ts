// SPDX-License-Identifier: Apache-2.0
// Types of the server's answers as JSON. Generated from src/sonde/server/schemas.py by
// scripts/web_types.py; a test checks that it is current.

export type FlameNode = { name: string; binary: string; kind: string; value: number; self: number; children?: FlameNode[] };
export type OverviewAnswer = ({ node: string; chunks: number; first_ns: number; last_ns: number; seconds: number; cpu_ns: number | null; blocked_ns: number | null; runqueue_ns: number | null; device_ns: number | null; kernel_ns: number | null; lost: number })[];
export type FlamegraphAnswer = { total: { rows: number; n: number; ns: number; bytes: number }; frames: { kind: string; function: string; binary: string; file: string; line: number }[]; stacks: { frames: number[]; n: number; ns: number; bytes: number }[] };
export type FlametreeAnswer = { unit: "ns" | "bytes"; total: number; not_shown: number; left_out: number; root: FlameNode };
export type LanesAnswer = { start_ns: number; end_ns: number; lanes: { lane: number; node: string; lane_kind: string; pid: number; tid: number; comm: string; device: number; stream: number; ns: number }[]; boxes: { lane: number[]; start: number[]; end: number[]; name: string[]; n: number[]; ns: number[] } };
export type FramesAnswer = { key: number; kind: string; function: string; binary: string; file: string; line: number }[];
export type TotalsAnswer = { rows: number; n: number; ns: number; bytes: number };
export type TopAnswer = { function: string; binary: string; own_ns: number; total_ns: number }[];
export type NamesAnswer = { name: string; n: number; ns: number; bytes: number }[];
export type ProcessesAnswer = ({ node: string; pid: number; start_ns: number; n: number; ns: number; bytes: number; comm: string | null; exe: string | null; user: string | null; pod: string | null; namespace: string | null; job: string | null; container: string | null; unit: string | null })[];
export type DiffAnswer = { function: string; binary: string; before: number; after: number }[];
export type SeriesAnswer = { node: string; labels: string; time_ns: number; value: number; least: number; most: number }[];
export type ChartsAnswer = { node: string; series: string; labels: string; time_ns: number; value: number; least: number; most: number }[];
export type DevicesAnswer = { node: string; series: string; labels: string; mean: number; least: number; most: number; last: number }[];
export type KernelsAnswer = { kind: string; name: string; runs: number; ns: number; mean_ns: number; most_ns: number; timed: number }[];
export type MetricsAnswer = { series: string; nodes: number; rows: number }[];
export type NodesAnswer = { node: string; chunks: number; sample_rows: number; first_ns: number; last_ns: number; size_bytes: number; about: string }[];
export type RanksAnswer = { by: "steps" | "time"; slots: { start_ns: number[]; end_ns: number[] }; ranks: { node: string; pid: number; start_ns: number; device: number; ns: number; comm: string; job: string; user: string; pod: string; container: string; all_timed: boolean }[]; cells: { rank: number[]; slot: number[]; work_ns: number[]; collective_ns: number[]; runs: number[] }; collectives: number; left_out: number };
export type MemoryAnswer = ({ node: string; pid: number; start_ns: number; mapped: number; unmapped: number; grown: number; faulted: number; reserved: number; comm: string | null; exe: string | null; user: string | null; pod: string | null; namespace: string | null; job: string | null; container: string | null; unit: string | null })[];
export type JobAnswer = { by: string; id: string; slot_s: number; nodes: string[]; gpus: number; held_h: number; productive_h: number; stalled_h: number; idle_h: number; unknown_h: number; wasted_h: number; wasted: { cause: string; gpu_h: number }[]; verdicts: { node: string; start_ns: number; end_ns: number; verdict: Record<string, unknown> }[]; functions: { function: string; binary: string; own_ns: number; total_ns: number }[]; waiting: { kind: string; text: string; count: number; compared: number; lost_s: number; per: "step" | "second"; evidence: string[]; missing: string[]; start_ns: number; end_ns: number; ranks: { node: string; pid: number; device: number; comm: string; number: number; work: number; collective: number }[]; node: Record<string, unknown> | null }; not_covered: string[] };
export type OwnersAnswer = { by: string; slot_s: number; owners: { owner: string; nodes: number; gpus: number; held_h: number; productive_h: number; stalled_h: number; idle_h: number; unknown_h: number; wasted_h: number }[]; left_out: number; not_covered: string[] };
export type LossesAnswer = { node: string; name: string; value: number }[];
export type FleetAnswer = { shown: boolean; releases: ({ id: string; task: string; start_s: number; duration_s: number; unit: string; privacy: string; delta: number; budget: number; samples: number; buckets: number; collected: number; spent: ({ unit: string; one_release: number | null; worst_year: number | null; full_year: number | null })[]; applications: { rows: { name: string; count: number; error: number; share: number; share_error: number }[]; in_noise: number; left_out: number }; kernels: { rows: { name: string; count: number; error: number; share: number; share_error: number }[]; in_noise: number; left_out: number } })[]; older: number; unreadable: number };
