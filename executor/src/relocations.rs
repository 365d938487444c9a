//! Moves of what is mapped to other physical memory, on the copy thread.

use std::sync::Arc;

use millrace_device::{Device, Error as DeviceError, Extent};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{MapFailed, Relocate, Relocated};

use crate::events::clip;
use crate::mapping::{MapError, Mapping};
use crate::process::Shared;
use crate::wire;

/// One program's move.
#[derive(Debug)]
pub(crate) struct Relocation<D: Device> {
    mapping: Arc<Mapping<D>>,
    id: u64,
    was: u64,
    generation: u64,
    extents: Vec<(u64, Extent)>,
}

impl<D: Device> Relocation<D> {
    /// Takes the move of a program that is loaded.
    pub(crate) fn new(message: Relocate, mapping: Arc<Mapping<D>>) -> Self {
        let Relocate { program: id, was, generation, extents } = message;
        let extents = extents.into_iter().map(wire::extent).collect();
        Self { mapping, id, was, generation, extents }
    }

    /// Moves it, and says what came of that.
    pub(crate) fn carry_out(self, shared: &Shared<D>) -> Event {
        let Self { mapping, id, was, generation, extents } = self;
        match mapping.relocate(was, generation, extents) {
            Ok(()) => Event::Relocated(Relocated { program: id, generation }),
            Err(error) => {
                if let MapError::Device(DeviceError::Lost(message)) = &error {
                    shared.events.device_failed(message);
                }
                refused(id, generation, error)
            }
        }
    }
}

/// The event for a move that was not made.
pub(crate) fn refused(program: u64, generation: u64, why: impl ToString) -> Event {
    Event::MapFailed(MapFailed { program, generation, message: clip(why) })
}
