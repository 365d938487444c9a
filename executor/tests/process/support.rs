//! The worker's side of the socket, as far as tests need it, and models to run.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use bytes::Bytes as Buffer;
use millrace_device::emulated::SmPage;
use millrace_device::{DeviceMemory, HostRegion, HostRegionBuilder, monotonic_now};
use millrace_model::{CompiledModel, Grouping, WeightSource};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;
use millrace_proto::frames::{FrameDecoder, FrameQueue, SocketFrame};
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::Bytes;

pub(crate) const MEMORY: Bytes = Bytes::mib(512);
pub(crate) const PAGE: u64 = 4096;
/// Environment variable that makes the test binary an executor. Benches use an argument instead.
pub(crate) const EXECUTOR_VARIABLE: &str = "MILLRACE_TEST_EXECUTOR";
/// Time limit for an event; no event takes this long.
const HANG: Duration = Duration::from_secs(120);

/// A model in the form that a worker stores.
pub(crate) struct Model {
    pub(crate) compiled: CompiledModel,
    pub(crate) graph: HostRegion,
    pub(crate) weights: HostRegion,
    /// Whether the executor treats the weights as pageable memory.
    pub(crate) pageable: bool,
}

impl Model {
    pub(crate) fn new(onnx: Vec<u8>) -> Self {
        Self::padded(onnx, 0)
    }

    /// Returns a model with additional bytes behind the weights that no launch reads. Each page of
    /// these bytes has a mark.
    pub(crate) fn padded(onnx: Vec<u8>, padding: u64) -> Self {
        let onnx = Buffer::from(onnx);
        let compiled = millrace_model::compile(&onnx).unwrap();
        Self::of(compiled, &onnx, padding)
    }

    /// Returns a model that is cut with this grouping.
    pub(crate) fn grouped(onnx: &Buffer, grouping: Grouping) -> Self {
        Self::of(millrace_model::compile_grouped(onnx, grouping).unwrap(), onnx, 0)
    }

    fn of(compiled: CompiledModel, onnx: &Buffer, padding: u64) -> Self {
        let own = compiled.summary.weights_bytes;
        let mut weights = HostRegionBuilder::new("weights", Bytes(own + padding)).unwrap();
        for weight in &compiled.weights {
            let bytes = match &weight.source {
                WeightSource::File(range) => &onnx[range.clone()],
                WeightSource::Owned(bytes) => bytes,
            };
            weights.write_at(weight.offset, bytes).unwrap();
        }
        for offset in (own..own + padding).step_by(PAGE as usize) {
            weights.write_at(offset, &[0xAB]).unwrap();
        }
        let graph = HostRegion::from_bytes("graph", &compiled.graph).unwrap();
        Self { compiled, graph, weights: weights.finish().unwrap(), pageable: false }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.weights.bytes().get()
    }

    pub(crate) fn pages(&self) -> u64 {
        self.bytes().next_multiple_of(PAGE)
    }

    /// Returns all bytes that the model's launches read.
    pub(crate) fn all(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.compiled.summary.weights_bytes).collect()
    }

    pub(crate) fn load(&self, program: u64) -> (Command, Vec<OwnedFd>) {
        let launches = self.compiled.launches.iter().map(|launch| Launch {
            writes: launch.writes.clone(),
            args: launch.args.clone(),
            reads: launch.reads.iter().cloned().map(byte_range).collect(),
        });
        let specs = |specs: &[millrace_types::TensorSpec]| {
            let spec = |spec: &millrace_types::TensorSpec| TensorSpec {
                name: spec.name.clone(),
                datatype: spec.datatype.to_string(),
                shape: spec.wire_shape(),
            };
            specs.iter().map(spec).collect()
        };
        let load = LoadProgram {
            program,
            name: "test".to_owned(),
            graph_fd: 0,
            graph_bytes: self.graph.bytes().get(),
            weights_fd: 1,
            weights_bytes: self.bytes(),
            launches: launches.collect(),
            inputs: specs(&self.compiled.summary.inputs),
            outputs: specs(&self.compiled.summary.outputs),
            weights_pageable: self.pageable,
            group_bytes: 0,
        };
        (Command::LoadProgram(load), vec![self.graph.share().unwrap(), self.weights.share().unwrap()])
    }
}

pub(crate) fn byte_range(range: Range<u64>) -> ByteRange {
    ByteRange { offset: range.start, bytes: range.end - range.start }
}

/// An executor process and the worker's end of its socket.
pub(crate) struct Executor {
    pub(crate) child: Child,
    pub(crate) socket: UnixStream,
    pub(crate) memory: DeviceMemory,
    pub(crate) sms: SmPage,
    decoder: FrameDecoder,
    /// Received events that no call has awaited so far.
    set_aside: Vec<(Event, Vec<OwnedFd>)>,
    pub(crate) batch: u64,
}

/// Starts this binary again as an executor.
pub(crate) fn spawn(stdin: OwnedFd, stderr: Stdio) -> Child {
    executor_command().stdin(stdin).stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
}

pub(crate) fn executor_command() -> Process {
    let mut command = Process::new(std::env::current_exe().unwrap());
    command.args(crate::EXECUTOR_ARGS).env(EXECUTOR_VARIABLE, "1");
    command
}

pub(crate) fn hello(memory: Bytes) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        build: BUILD.to_owned(),
        incarnation: 7,
        gpu: 0,
        device_memory_bytes: memory.get(),
        device_memory_fd: 0,
        threads: 1,
        allow_faults: true,
        probe_bytes: 0,
        late_seed: 0,
        engine: Engine::Rten.into(),
        device: Device::Emulated.into(),
        sm_page_fd: 0,
    }
}

pub(crate) fn send(socket: &UnixStream, command: Command, descriptors: Vec<OwnedFd>) {
    let message = millrace_proto::executor::Command { command: Some(command) };
    let mut outbox = FrameQueue::default();
    outbox.push(SocketFrame::new(&message, descriptors).unwrap()).unwrap();
    outbox.flush(socket).unwrap();
}

impl Executor {
    pub(crate) fn start() -> Self {
        Self::start_with(hello(MEMORY))
    }

    pub(crate) fn start_with(hello: Hello) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(HANG)).unwrap();
        let child = spawn(theirs.into(), Stdio::inherit());
        let memory = DeviceMemory::create("gpu", MEMORY).unwrap();
        let sms = SmPage::create("sms").unwrap();
        let descriptors = vec![memory.share().unwrap(), sms.share().unwrap()];
        send(&socket, Command::Hello(Hello { sm_page_fd: 1, ..hello }), descriptors);
        let decoder = FrameDecoder::default();
        let mut executor = Self { child, socket, memory, sms, decoder, set_aside: Vec::new(), batch: 0 };
        let pid = executor.child.id();
        let ready = executor.expect(|event| match event {
            Event::Ready(ready) => Some(ready),
            _ => None,
        });
        let expected = Ready {
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.to_owned(),
            pid,
            incarnation: 7,
            ..ready.clone()
        };
        assert_eq!(ready, expected);
        executor
    }

    /// Starts an executor with a model loaded as this program.
    pub(crate) fn with(model: &Model, program: u64) -> Self {
        let mut executor = Self::start();
        executor.load(model, program);
        executor
    }

    pub(crate) fn send(&self, command: Command) {
        send(&self.socket, command, Vec::new());
    }

    /// Waits for the next event that `wanted` accepts, and sets other events aside.
    pub(crate) fn expect<T>(&mut self, wanted: impl FnMut(Event) -> Option<T>) -> T {
        self.expect_with(wanted).0
    }

    fn expect_with<T>(&mut self, mut wanted: impl FnMut(Event) -> Option<T>) -> (T, Vec<OwnedFd>) {
        let mut index = 0;
        loop {
            if index == self.set_aside.len() {
                let frame = self.decoder.recv_frame(&self.socket).unwrap().expect("the executor ended");
                let event: millrace_proto::executor::Event = frame.decode().unwrap();
                self.set_aside.push((event.event.unwrap(), frame.descriptors));
            }
            if let Some(taken) = wanted(self.set_aside[index].0.clone()) {
                return (taken, self.set_aside.remove(index).1);
            }
            index += 1;
        }
    }

    /// Takes the wanted events that were set aside, without waiting.
    pub(crate) fn said<T>(&mut self, mut wanted: impl FnMut(&Event) -> Option<T>) -> Vec<T> {
        let mut said = Vec::new();
        self.set_aside.retain(|(event, _)| {
            let taken = wanted(event);
            let keep = taken.is_none();
            said.extend(taken);
            keep
        });
        said
    }

    /// Asserts that no unexpected event was received.
    pub(crate) fn said_no_more(&self) {
        assert!(self.set_aside.is_empty(), "{:?}", self.set_aside);
    }

    pub(crate) fn load(&mut self, model: &Model, program: u64) {
        let (command, descriptors) = model.load(program);
        send(&self.socket, command, descriptors);
        let loaded = self.expect(|event| match event {
            Event::ProgramLoaded(loaded) => Some(Ok(loaded.program)),
            Event::ProgramFailed(failed) => Some(Err(failed)),
            _ => None,
        });
        assert_eq!(loaded, Ok(program));
    }

    pub(crate) fn load_failure(&mut self, load: LoadProgram, descriptors: Vec<OwnedFd>) -> String {
        send(&self.socket, Command::LoadProgram(load), descriptors);
        self.expect(|event| match event {
            Event::ProgramFailed(failed) => Some(failed.message),
            Event::ProgramLoaded(_) => panic!("the program was loaded"),
            _ => None,
        })
    }

    /// Maps a program's range to the memory that starts at `device_offset`.
    pub(crate) fn map(&self, model: &Model, program: u64, generation: u64, device_offset: u64) {
        let extents = vec![Extent { range_offset: 0, device_offset, bytes: model.pages() }];
        self.send(Command::Map(Map { program, generation, extents }));
    }

    pub(crate) fn unmap(&mut self, program: u64, generation: u64) {
        self.send(Command::Unmap(Unmap { program, generation }));
        self.expect_unmapped(program, generation);
    }

    pub(crate) fn expect_unmapped(&mut self, program: u64, generation: u64) {
        let expected = Unmapped { program, generation };
        self.expect(|event| (event == Event::Unmapped(expected)).then_some(()));
    }

    /// Grants a copy with an open window. Returns its batch.
    pub(crate) fn grant(&mut self, program: u64, generation: u64, ranges: &[Range<u64>]) -> u64 {
        let hour = Duration::from_secs(3600);
        self.grant_in(program, generation, ranges, 0, (monotonic_now() + hour).as_nanos())
    }

    pub(crate) fn grant_in(
        &mut self,
        program: u64,
        generation: u64,
        ranges: &[Range<u64>],
        not_before_ns: u64,
        not_after_ns: u64,
    ) -> u64 {
        let ranges = ranges.iter().cloned().map(byte_range).collect();
        let copy = Copy { program, generation, ranges, not_before_ns, not_after_ns, ..Copy::default() };
        self.grant_copy(copy)
    }

    pub(crate) fn grant_copy(&mut self, copy: Copy) -> u64 {
        self.batch += 1;
        self.send(Command::Copy(Copy { transfer: 1, batch: self.batch, ..copy }));
        self.batch
    }

    /// Grants a copy, from a peer and with an open window, of all bytes that a program's launches read.
    pub(crate) fn grant_from(&mut self, peer: PeerSource, model: &Model, generation: u64) -> u64 {
        let ranges = model.all().into_iter().map(byte_range).collect();
        let not_after_ns = (monotonic_now() + Duration::from_secs(3600)).as_nanos();
        let peer = Some(peer);
        self.grant_copy(Copy { program: 1, generation, ranges, not_after_ns, peer, ..Copy::default() })
    }

    /// Passes another GPU's memory to the executor, as that of GPU 1.
    pub(crate) fn add_peer(&self, peer: &DeviceMemory, incarnation: u64) {
        let gpu = 1;
        let memory_bytes = peer.bytes().get();
        let memory_fd = 0;
        let add = AddPeer { gpu, incarnation, memory_bytes, memory_fd };
        send(&self.socket, Command::AddPeer(add), vec![peer.share().unwrap()]);
    }

    pub(crate) fn copied(&mut self, batch: u64) -> Result<CopyDone, (CopyFailure, String)> {
        self.expect(|event| match event {
            Event::CopyDone(done) if done.batch == batch => Some(Ok(done)),
            Event::CopyFailed(failed) if failed.batch == batch => {
                Some(Err((failed.failure(), failed.message)))
            }
            _ => None,
        })
    }

    pub(crate) fn copy_failure(&mut self, batch: u64) -> CopyFailure {
        self.copied(batch).unwrap_err().0
    }

    /// Maps a program, and copies all bytes that its launches read.
    pub(crate) fn bring_in(&mut self, model: &Model, program: u64, generation: u64) {
        self.map(model, program, generation, 0);
        let batch = self.grant(program, generation, &model.all());
        self.copied(batch).unwrap();
    }

    /// Starts a run.
    pub(crate) fn run(&self, run: u64, program: u64, generation: u64, inputs: Vec<Tensor>) {
        self.send(Command::Run(Run { run, program, generation, inputs, ..Run::default() }));
    }

    pub(crate) fn ran(&mut self, run: u64) -> Result<Answer, (RunFailure, String)> {
        let (done, descriptors) = self.expect_with(|event| match event {
            Event::RunDone(done) if done.run == run => Some(Ok(done)),
            Event::RunFailed(failed) if failed.run == run => Some(Err((failed.failure(), failed.message))),
            _ => None,
        });
        done.map(|done| Answer { done, descriptors })
    }

    pub(crate) fn run_failure(&mut self, run: u64) -> RunFailure {
        self.ran(run).unwrap_err().0
    }

    pub(crate) fn inject(&self, fault: Fault, program: u64) {
        self.send(Command::InjectFault(InjectFault { fault: fault.into(), program }));
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // This fails only if the executor has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The response of a run.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) done: RunDone,
    descriptors: Vec<OwnedFd>,
}

impl Answer {
    /// Returns the bytes of the first output.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match self.done.outputs[0].contents.as_ref().unwrap() {
            tensor::Contents::Inline(bytes) => bytes.to_vec(),
            tensor::Contents::ContentsFd(index) => {
                let file = &self.descriptors[*index as usize];
                let size = rustix::fs::fstat(file).unwrap().st_size as usize;
                let mut bytes = vec![0; size];
                let mut filled = 0;
                while filled < size {
                    filled += rustix::io::pread(file, &mut bytes[filled..], filled as u64).unwrap();
                }
                bytes
            }
            other => panic!("unexpected contents of an output: {other:?}"),
        }
    }
}

/// Returns `count` small pseudo-random numbers.
pub(crate) fn numbers(count: usize) -> Vec<u8> {
    let number = |i: usize| (((i * 2_654_435_761) % 2001) as f32 - 1000.0) / 1000.0;
    (0..count).flat_map(|i| number(i).to_le_bytes()).collect()
}

pub(crate) fn tensor(name: &str, datatype: &str, shape: &[i64], bytes: Vec<u8>) -> Tensor {
    let contents = Some(tensor::Contents::Inline(bytes.into()));
    Tensor { name: name.to_owned(), datatype: datatype.to_owned(), shape: shape.to_vec(), contents }
}

/// Returns an FP32 input `x` of this shape.
pub(crate) fn x(shape: &[i64]) -> Vec<Tensor> {
    let count = shape.iter().product::<i64>() as usize;
    vec![tensor("x", "FP32", shape, numbers(count))]
}
