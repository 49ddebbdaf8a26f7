// SPDX-License-Identifier: Apache-2.0

// What Go's runtime does with stacks, all of it at once: goroutines that grow theirs, hand over to
// one another, ask the vdso for the time on the thread's own stack, fault, and are interrupted by
// signals, while garbage is collected.
package main

import (
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:noinline
func grow(n int) int {
	var kept [64]int
	kept[n%64] = n
	if n == 0 {
		return kept[0]
	}
	return grow(n-1) + kept[(n*7)%64]
}

func growing() {
	var all sync.WaitGroup
	for depth := 30; depth < 230; depth += 10 {
		all.Add(1)
		go func(depth int) {
			grow(depth)
			all.Done()
		}(depth)
	}
	all.Wait()
}

var there, back = make(chan int), make(chan int)

func answering() { back <- <-there }

func asking() {
	there <- 1
	<-back
}

//go:noinline
func clocks() {
	for i := 0; i < 1000; i++ {
		if time.Now().IsZero() {
			panic("no time")
		}
	}
	time.Sleep(time.Microsecond)
}

var garbage [64]string

func allocating() {
	for i := range garbage {
		garbage[i] = strings.Repeat("x", 1000+i*80)
	}
}

func faulting() {
	defer func() { _ = recover() }()
	var nowhere *int
	*nowhere = 1
}

func signalling() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGUSR1)
}

//go:noinline
func spin() int {
	sum := 0
	for i := 0; i < 10000; i++ {
		sum += i ^ (sum << 1)
	}
	return sum
}

func collecting() {
	runtime.GC()
	time.Sleep(5 * time.Millisecond)
}

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	for _, it := range []func(){
		growing, answering, asking, clocks, allocating, faulting, signalling, collecting,
		func() { <-signals },
	} {
		go func(it func()) {
			for {
				it()
			}
		}(it)
	}
	for {
		spin()
	}
}
