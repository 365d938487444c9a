//! How data gets to who asked for it (`FaaSTube` §5.1; D04), by where both are.

use std::fmt;

use millrace_types::{GpuIndex, NodeName};

/// Where on a node something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// In host memory.
    Host,
    /// In a GPU's memory.
    Gpu(GpuIndex),
}

/// Where in the cluster something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Location<'a> {
    /// On which node.
    pub node: &'a NodeName,
    /// Where there.
    pub place: Place,
}

/// The ways to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    /// Mapped where it is: same GPU.
    IntraGpu,
    /// Over NVLink paths: another GPU of the node.
    InterGpu,
    /// Over the node's PCIe links, one way or the other.
    HostGpu,
    /// Over the network, by the host memory of both nodes.
    InterNode,
    /// Read where it is, in host memory that the node's processes share (D10). The paper counts four
    /// ways and leaves this one out: nothing is transferred.
    SharedHost,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::IntraGpu => "intra-gpu",
            Self::InterGpu => "inter-gpu",
            Self::HostGpu => "host-gpu",
            Self::InterNode => "inter-node",
            Self::SharedHost => "shared-host",
        })
    }
}

/// The one way from where data is to who asks for it.
#[must_use]
pub fn method(data: Location<'_>, requester: Location<'_>) -> Method {
    if data.node != requester.node {
        return Method::InterNode;
    }
    match (data.place, requester.place) {
        (Place::Gpu(from), Place::Gpu(to)) if from == to => Method::IntraGpu,
        (Place::Gpu(_), Place::Gpu(_)) => Method::InterGpu,
        (Place::Host, Place::Gpu(_)) | (Place::Gpu(_), Place::Host) => Method::HostGpu,
        (Place::Host, Place::Host) => Method::SharedHost,
    }
}
