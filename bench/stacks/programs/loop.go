// SPDX-License-Identifier: Apache-2.0

package main

import (
	"sort"
	"strings"
)

//go:noinline
func inner(n int) int {
	s := 0
	for i := 0; i < n; i++ {
		s += i ^ (s << 1)
	}
	return s
}

//go:noinline
func words(n int) int {
	all := make([]string, n)
	for i := range all {
		all[i] = strings.Repeat("x", (i*7919)%31)
	}
	sort.Slice(all, func(a, b int) bool { inner(30); return all[a] < all[b] })
	return len(all[0])
}

func main() {
	go func() {
		for {
			words(300)
		}
	}()
	for {
		inner(10000)
	}
}
