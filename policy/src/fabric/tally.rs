//! What the fabric counts of transfers between the host and GPUs.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::topology::LinkId;

use crate::paths::{Direction, Each};
use crate::rates::Standing;

/// Transfers between the host and GPUs that are over, by what they could count on at last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Nobody waited for them, or links are not shared by objective.
    pub unpromised: u64,
    /// They had the rate that they needed.
    pub admitted: u64,
    /// That rate did not fit beside those that were wanted earlier.
    pub crowded: u64,
    /// They could be in time when they began, and not any more.
    pub late: u64,
    /// They could not have been in time with their links to themselves.
    pub infeasible: u64,
}

impl Counts {
    pub(super) fn add(&mut self, standing: Standing) {
        let count = match standing {
            Standing::Unpromised => &mut self.unpromised,
            Standing::Admitted { .. } => &mut self.admitted,
            Standing::Crowded { .. } => &mut self.crowded,
            Standing::Late { .. } => &mut self.late,
            Standing::Infeasible(_) => &mut self.infeasible,
        };
        *count += 1;
    }

    /// Each with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 5] {
        let Self { unpromised, admitted, crowded, late, infeasible } = *self;
        [
            ("unpromised", unpromised),
            ("admitted", admitted),
            ("crowded", crowded),
            ("late", late),
            ("infeasible", infeasible),
        ]
    }
}

/// How long transfers waited for their first batch on a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wait {
    /// How many had their first batch by it.
    pub transfers: u64,
    /// From their beginning until that could begin, together.
    pub waited: Duration,
}

/// What the fabric has counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Transfers between the host and GPUs that ended.
    pub ended: Each<Counts>,
    /// By the link that issued their first batch, and which way it went.
    pub waits: BTreeMap<(LinkId, Direction), Wait>,
}
