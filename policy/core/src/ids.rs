//! Identifiers that are valid on one worker only.

use std::fmt;

macro_rules! local_id {
    ($(#[$doc:meta])* $type:ident($inner:ty), $mark:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(pub $inner);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($mark, "{}"), self.0)
            }
        }
    };
}

local_id!(
    /// An attempt of a request, numbered in the order in which the worker accepted the attempts:
    /// the order of the queue.
    RequestKey(u64),
    "r"
);
local_id!(
    /// A function revision hosted on the worker. Never reused while the worker lives.
    FunctionIndex(u32),
    "f"
);
local_id!(
    /// A tenant with caps, as one worker numbers tenants.
    TenantIndex(u32),
    "tenant"
);
local_id!(
    /// A seat: a place on a GPU where one request runs at a time. Numbered over all GPUs of the
    /// worker. On a worker whose GPUs cannot be shared, each GPU has one seat, which has the number of the
    /// GPU.
    SeatIndex(u32),
    "seat"
);
local_id!(
    /// A run in one executor. A request that is started twice has two runs.
    RunId(u64),
    "run"
);
local_id!(
    /// A mapping of a model into a GPU's memory. Every copy and run that relies on the mapping
    /// carries this number.
    Generation(u64),
    "g"
);
local_id!(
    /// A transfer of bytes over a path.
    TransferId(u64),
    "t"
);
local_id!(
    /// One grant of a transfer, numbered from 0 within the transfer.
    BatchId(u64),
    "b"
);
local_id!(
    /// A sequence's state after one run of its function.
    StateId(u64),
    "state"
);
local_id!(
    /// An object in transit between memories of one node, over any number of links, as the caller
    /// numbers objects.
    FlowId(u64),
    "flow"
);
local_id!(
    /// A piece of intermediate data. Never reused while the worker lives.
    ObjectKey(u64),
    "o"
);
