//! The SLO counts of functions in the whole cluster, which the checkpoints bring to the node.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::{FunctionKey, SloCounts};

/// SLO counts of the functions placed here: the counts from other nodes and earlier placements,
/// plus the counts of this registration. Updated about once a second.
pub type SloScores = Arc<BTreeMap<FunctionKey, SloCounts>>;
