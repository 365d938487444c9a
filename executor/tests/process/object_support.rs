//! Support for tests of objects. The model is the perceptron, with inputs of `ROWS` rows.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::copy_out::Source;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::support::{Executor, PAGE, byte_range, send, tensor};

/// Number of rows that makes the output larger than an inline tensor.
pub(crate) const ROWS: i64 = 300;
pub(crate) const Y_BYTES: u64 = 300 * 64 * 4;
/// Offset of the objects in device memory, after the model.
pub(crate) const AT: u64 = 64 << 20;

/// The source of a copy to the host.
pub(crate) enum Part {
    Object(ObjectPart),
    Output(OutputPart),
}

/// Returns all of the output `y` of this run.
pub(crate) fn whole(run: u64) -> OutputPart {
    OutputPart { run, output: "y".to_owned(), offset: 0, bytes: Y_BYTES }
}

/// Returns all of an object that is as large as `y`.
pub(crate) fn object(object: u64) -> ObjectPart {
    ObjectPart { object, offset: 0, bytes: Y_BYTES }
}

/// Returns the input `x` with the bytes of an object.
pub(crate) fn on(part: ObjectPart) -> Vec<Tensor> {
    let contents = Some(tensor::Contents::Object(part));
    vec![Tensor { contents, ..tensor("x", "FP32", &[ROWS, 64], vec![]) }]
}

/// Returns a placement of an object in two pieces. The first piece is a page, and a page with other
/// contents separates the pieces.
pub(crate) fn placed(object: u64, bytes: u64, output: Option<OutputPart>) -> PlaceObject {
    let first = Extent { range_offset: 0, device_offset: AT, bytes: PAGE };
    let rest = bytes.next_multiple_of(PAGE).max(2 * PAGE) - PAGE;
    let second = Extent { range_offset: PAGE, device_offset: AT + 2 * PAGE, bytes: rest };
    PlaceObject { object, bytes, extents: vec![second, first], output, ..PlaceObject::default() }
}

/// Reads the GPU's memory at the position where [`placed`] puts an object.
pub(crate) fn memory_of(executor: &Executor, at: u64, bytes: u64) -> Vec<u8> {
    let mut found = vec![0; bytes as usize];
    let (first, rest) = found.split_at_mut(PAGE as usize);
    executor.memory.read_at(at, first).unwrap();
    executor.memory.read_at(at + 2 * PAGE, rest).unwrap();
    found
}

/// Creates memory as a worker does, which is not sealed.
pub(crate) fn file(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(rustix::io::pwrite(&file, bytes, 0).unwrap(), bytes.len());
    file
}

/// A requested copy to the host, and its target.
pub(crate) struct Copying {
    pub(crate) copy: u64,
    to: OwnedFd,
}

impl Copying {
    /// Returns the bytes that have arrived so far.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; rustix::fs::fstat(&self.to).unwrap().st_size as usize];
        assert_eq!(rustix::io::pread(&self.to, &mut bytes, 0).unwrap(), bytes.len());
        bytes
    }
}

impl Executor {
    /// Runs program 1, and keeps its output.
    pub(crate) fn keep(&mut self, run: u64, inputs: Vec<Tensor>) -> RunDone {
        let kept = vec!["y".to_owned()];
        self.send(Command::Run(Run { run, program: 1, generation: 1, inputs, kept, ..Run::default() }));
        self.ran(run).unwrap().done
    }

    pub(crate) fn place(&mut self, place: PlaceObject) -> Result<(), String> {
        self.send(Command::PlaceObject(place.clone()));
        self.placed(place.object)
    }

    pub(crate) fn place_with_host(&mut self, place: PlaceObject, host: OwnedFd) -> Result<(), String> {
        let object = place.object;
        let place = PlaceObject { has_host: true, host_fd: 0, ..place };
        send(&self.socket, Command::PlaceObject(place), vec![host]);
        self.placed(object)
    }

    fn placed(&mut self, object: u64) -> Result<(), String> {
        self.expect(|event| match event {
            Event::ObjectPlaced(placed) if placed.object == object => Some(Ok(())),
            Event::PlaceFailed(failed) if failed.object == object => Some(Err(failed.message)),
            _ => None,
        })
    }

    pub(crate) fn free(&mut self, object: u64) {
        self.send(Command::FreeObject(FreeObject { object }));
        self.expect(|event| (event == Event::ObjectFreed(ObjectFreed { object })).then_some(()));
    }

    /// Grants a copy to an object with an open window. Returns the batch.
    pub(crate) fn grant_object(&mut self, object: u64, range: Range<u64>, peer: Option<PeerSource>) -> u64 {
        let ranges = vec![byte_range(range)];
        let not_after_ns = (monotonic_now() + Duration::from_secs(3600)).as_nanos();
        self.grant_copy(Copy { object, ranges, not_after_ns, peer, ..Copy::default() })
    }

    pub(crate) fn begin_copy_out(&mut self, part: Part) -> Copying {
        self.begin(part, false)
    }

    /// Begins a copy to the host whose bytes are copied under grants.
    pub(crate) fn begin_granted(&mut self, part: Part) -> Copying {
        self.begin(part, true)
    }

    fn begin(&mut self, part: Part, granted: bool) -> Copying {
        self.batch += 1;
        let copy = self.batch;
        let to = file(&[]);
        let source = Some(match part {
            Part::Object(part) => Source::Object(part),
            Part::Output(part) => Source::Output(part),
        });
        let message = CopyOut { copy, source, contents_fd: 0, granted };
        send(&self.socket, Command::CopyOut(message), vec![to.try_clone().unwrap()]);
        Copying { copy, to }
    }

    pub(crate) fn copied_out(&mut self, copying: Copying) -> Result<Vec<u8>, String> {
        let copy = copying.copy;
        self.expect(|event| match event {
            Event::CopiedOut(copied) if copied.copy == copy => Some(Ok(())),
            Event::CopyOutFailed(failed) if failed.copy == copy => Some(Err(failed.message)),
            _ => None,
        })?;
        Ok(copying.bytes())
    }

    /// Grants bytes of a copy to the host, with this window in nanoseconds. Returns the batch.
    pub(crate) fn grant_out(&mut self, copying: &Copying, range: Range<u64>, window: Range<u64>) -> u64 {
        let ranges = vec![byte_range(range)];
        let copy_out = copying.copy;
        let not_before_ns = window.start;
        let not_after_ns = window.end;
        self.grant_copy(Copy { copy_out, ranges, not_before_ns, not_after_ns, ..Copy::default() })
    }

    pub(crate) fn end_copy_out(&self, copying: &Copying) {
        self.send(Command::EndCopyOut(EndCopyOut { copy: copying.copy }));
    }

    pub(crate) fn copy_out(&mut self, part: Part) -> Result<Vec<u8>, String> {
        let copying = self.begin_copy_out(part);
        self.copied_out(copying)
    }
}
