//! Chooses the NVLinks that bytes take from one GPU of a node to another, and to the host over
//! other GPUs' PCIe links (FaaSTube §6.2, Algorithm 1; D05, D07, D19 to D22).
//!
//! The inputs are transfers that begin and end. The outputs are the routes of each transfer, with
//! their rates, whenever they change. A GPU server is a network. Pairs without an NVLink, 12 of
//! DGX-V100's 28 (H26), reach each other through other GPUs; pairs with an NVLink are faster with
//! detours beside it.
//!
//! ```text
//! begin, begin_host, end ──► ┌─────────────┐ ──► RouteChange { flow, routes }
//!                            │ PathPlanner │ ──► HostPlan
//!                            └─────────────┘
//! ```
//!
//! A new transfer takes, in this order:
//! 1. The link that joins its pair. The transfer owns this link: flows of other pairs leave the
//!    link, and take free links. A flow that would then have no route stays on the link with a fair
//!    share. Owners are never evicted, so no two flows evict each other in turns.
//! 2. The shortest paths over free links, until no more bytes can leave the source or arrive at the
//!    destination. Each path has the rate of the narrowest link, and every link of the path has
//!    that much less left.
//! 3. Busy paths. A route of another flow moves to a path where it is as fast, or faster flows give
//!    the slower flow a part (see `balance`).
//!
//! Then, and when a flow ends, all flows take the free links, the slowest flow first. Between GPUs
//! that no NVLinks join, a flow has no route, and the caller sends its bytes over the host.
//!
//! Absent: PCIe bandwidth, which belongs to the scheduler of host transfers; chunks and batches. A
//! caller finishes the batches that it has sent, and sends the next batches over the new routes.

mod aware;
mod balance;
mod config;
mod direction;
mod error;
mod fixed;
mod hops;
mod host;
mod limits;
mod matrix;
mod place;
mod planner;
mod route;
mod running;
mod search;
#[cfg(test)]
mod tests;
mod ways;

pub use self::config::{Config, FORWARDS_MAX, HOPS_DEFAULT, HOST_LINKS, HostLinks, Selection, UCX_ROUTES};
pub use self::direction::{HostDirection, PerDirection};
pub use self::error::Error;
pub use self::hops::{HOPS_MAX, RouteHops};
pub use self::host::{HostPlan, HostRoute};
pub use self::limits::{FLOWS_MAX, GPUS_MAX, LINKS_MAX, ROUTES_MAX};
pub use self::place::{DataEdge, place};
pub use self::planner::PathPlanner;
pub use self::route::{NvlinkRoute, RouteChange};
pub use self::ways::{PairRate, pair_rates};
pub use millrace_core::ids::FlowId;
