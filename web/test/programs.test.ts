// SPDX-License-Identifier: Apache-2.0
import { expect, test } from "vitest";
import { programOf } from "../src/programs";

test("a process is called by what its interpreter runs", () => {
  expect(programOf({ command: "train.py rank 3", comm: "python3" })).toBe("train.py rank 3");
  expect(programOf({ command: "", comm: "nginx" })).toBe("nginx");
  expect(programOf({ command: null, comm: null })).toBe("unknown");
});
