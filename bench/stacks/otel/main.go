// SPDX-License-Identifier: Apache-2.0

// Command otel runs OpenTelemetry's eBPF profiler on the whole machine and writes the outermost
// frame of every trace, and the names of all frames that have one, a line of JSON a trace, on stdout:
//
//	{"t": ns of CLOCK_REALTIME, "pid": 1, "tid": 1, "kind": "native", "name": "", "file": "libc.so.6", "address": 16, "frames": 12, "names": ["work"]}
//
// Native frames have no name here: the profiler sends addresses, and names are found behind the
// collector.
//
// Its own command line speaks to a collector only; this is the same tracer, with the same defaults,
// in front of another reporter. It prints "ready" on stderr once it observes, and ends with SIGINT.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"go.opentelemetry.io/ebpf-profiler/interpreter/interpreterconfig"
	"go.opentelemetry.io/ebpf-profiler/libpf"
	"go.opentelemetry.io/ebpf-profiler/metrics"
	"go.opentelemetry.io/ebpf-profiler/processmanager"
	"go.opentelemetry.io/ebpf-profiler/reporter/samples"
	"go.opentelemetry.io/ebpf-profiler/times"
	"go.opentelemetry.io/ebpf-profiler/tracer"
	"go.opentelemetry.io/otel/metric/noop"
)

type line struct {
	Time    uint64   `json:"t"`
	PID     uint32   `json:"pid"`
	TID     uint32   `json:"tid"`
	Kind    string   `json:"kind"`
	Name    string   `json:"name"`
	File    string   `json:"file"`
	Address uint64   `json:"address"`
	Frames  int      `json:"frames"`
	Names   []string `json:"names"`
}

type printer struct {
	mutex sync.Mutex
	out   *bufio.Writer
	to    *json.Encoder
}

// ReportTraceEvent writes the outermost frame and the names; kernel threads and traces without a user part are
// left out.
func (p *printer) ReportTraceEvent(trace *libpf.Trace, meta *samples.TraceEventMeta) error {
	if len(trace.Frames) == 0 {
		return nil
	}
	last := trace.Frames[len(trace.Frames)-1].Value()
	if last.Type == libpf.KernelFrame {
		return nil
	}
	out := line{
		Time: uint64(meta.Timestamp), PID: uint32(meta.PID), TID: uint32(meta.TID), Kind: last.Type.String(),
		Name: last.FunctionName.String(), Address: uint64(last.AddressOrLineno),
		Frames: len(trace.Frames),
	}
	if last.Type.IsError() {
		out.Kind = "error"
	}
	if last.Mapping.Valid() {
		out.File = last.Mapping.Value().File.Value().FileName.String()
	}
	for _, handle := range trace.Frames {
		frame := handle.Value()
		if name := frame.FunctionName.String(); name != "" && frame.Type != libpf.KernelFrame {
			out.Names = append(out.Names, name)
		}
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if err := p.to.Encode(out); err != nil {
		return err
	}
	return p.out.Flush()
}

func run(hz int) error {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	out := bufio.NewWriter(os.Stdout)
	report := &printer{out: out, to: json.NewEncoder(out)}
	metrics.Start(noop.Meter{})
	times.StartRealtimeSync(ctx, time.Minute)
	trc, err := tracer.NewTracer(ctx, &tracer.Config{
		TraceReporter:          report,
		Intervals:              times.New(5*time.Second, 5*time.Second, time.Minute),
		InterpretersConfig:     interpreterconfig.AllInterpreters(),
		SamplesPerSecond:       hz,
		FrameCacheSize:         processmanager.DefaultFrameCacheSize,
		KernelVersionCheck:     true,
		ProbabilisticInterval:  time.Minute,
		ProbabilisticThreshold: tracer.ProbabilisticThresholdMax,
		BPFFSRoot:              "/sys/fs/bpf/",
	})
	if err != nil {
		return err
	}
	defer trc.Close()
	trc.StartPIDEventProcessor(ctx)
	if err := trc.AttachTracer(nil); err != nil {
		return err
	}
	if err := trc.EnableProfiling(); err != nil {
		return err
	}
	if err := trc.AttachSchedMonitor(); err != nil {
		return err
	}
	traces := make(chan *libpf.EbpfTrace)
	if err := trc.StartMapMonitors(ctx, traces); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "ready")
	for {
		select {
		case trace := <-traces:
			if trace != nil {
				trc.HandleTrace(trace)
			}
		case <-trc.Done():
			return fmt.Errorf("the tracer gave up")
		case <-ctx.Done():
			return nil
		}
	}
}

func main() {
	hz := flag.Int("hz", 99, "samples a second and CPU")
	flag.Parse()
	if err := run(*hz); err != nil {
		fmt.Fprintln(os.Stderr, "otel:", err)
		os.Exit(1)
	}
}
