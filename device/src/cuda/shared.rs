//! What a GPU and its streams share.

use millrace_types::Bytes;

use super::driver::Context;
use crate::faults::Faults;

/// Value of [`Capabilities::copy_max`](crate::Capabilities::copy_max). Copies of 2 MiB reach 0.92 of the ceiling on an H100, and those
/// of 4 MiB 0.96.
pub(super) const COPY_MAX: Bytes = Bytes::mib(4);
/// The context of a GPU, and the faults that were injected.
#[derive(Debug)]
pub(super) struct Shared {
    context: Context,
    pub(super) faults: Faults,
}

impl Shared {
    pub(super) fn new(context: Context) -> Self {
        Self { context, faults: Faults::default() }
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }
}
