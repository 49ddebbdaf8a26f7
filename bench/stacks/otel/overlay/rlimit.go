// SPDX-License-Identifier: Apache-2.0

// Package rlimit stands in for the profiler's own while it is built here: that one insists on
// raising RLIMIT_MEMLOCK, which takes CAP_SYS_RESOURCE, and which kernels since 5.11 do not charge
// BPF maps to. This one goes on with the limit that there is.
package rlimit

import "golang.org/x/sys/unix"

// MaximizeMemlock raises the limit where that is allowed. Its result puts the old one back.
func MaximizeMemlock() (func(), error) {
	var old unix.Rlimit
	most := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &most, &old); err != nil {
		return func() {}, nil
	}
	return func() { _ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old) }, nil
}
