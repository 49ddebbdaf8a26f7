// SPDX-License-Identifier: Apache-2.0
// Allocates for ever, so that the collector runs and goroutines move to the thread's own stack.
package main

import "runtime"

type node struct {
	next *node
	room [64]byte
}

//go:noinline
func grow(depth int) *node {
	if depth == 0 {
		return &node{}
	}
	return &node{next: grow(depth - 1)}
}

func main() {
	runtime.LockOSThread()
	var kept *node
	for {
		kept = grow(40)
		if kept == nil {
			return
		}
	}
}
