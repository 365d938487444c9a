//! Leases: the time for which a silent node is still believed alive (the health
//! checks of Torpor §4.5, T16). The leader's table records signs of life, ends leases, and declares
//! nodes lost.
//!
//! ```text
//!           lease without a sign of life         grace on top
//! believed ─────────────────────────────► fenced ─────────────► lost
//!     ▲                                      │
//!     └─────────────── heard ────────────────┘
//! ```
//!
//! A fenced node continues to serve: the leader only refuses its writes to the replicated state,
//! because the node may be declared lost at any moment. A loss is final: the command that declares
//! the loss may already be on its way into the log, and the node has to register again for a new
//! epoch.
//!
//! Silence is judged by the leader's own clock. A leader that stood still itself has heard no node
//! and knows nothing, so the leader grants every node a full lease again. The leader detects a
//! stall by the gap between its ticks, which is why [`Leases::next_wake`] never lets more than a
//! quarter of a lease pass.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Epoch, NodeName, Timestamp};

/// Time for which a node may be silent.
pub const LEASE: Duration = Duration::from_secs(2);
/// Further silence before a fenced node is lost. Together with the new copies of its functions,
/// the loss is committed within a second after the lease.
pub const GRACE: Duration = Duration::from_millis(500);
/// Minimum number of ticks in a lease. More than two, so that a late tick is distinguishable from a
/// stall.
const TICKS_PER_LEASE: u32 = 4;

/// Limits of a node's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseLimits {
    /// Silence after which a node is fenced.
    pub lease: Duration,
    /// Further silence after which a fenced node is lost.
    pub grace: Duration,
}

impl Default for LeaseLimits {
    fn default() -> Self {
        Self { lease: LEASE, grace: GRACE }
    }
}

/// A registration of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeRegistration {
    pub node: NodeName,
    /// Number of the registration.
    pub epoch: Epoch,
}

/// State of a registration, as the leader believes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeaseState {
    /// The node is alive.
    Believed,
    /// The node may be alive and serves, but its state batches are refused.
    Fenced,
    /// The node is gone, and its messages are ignored.
    Lost,
    /// The registration is not in the table: an older epoch, or never registered.
    Unknown,
}

/// Result of a tick.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseTick {
    /// Registrations with a lease that ended.
    pub fenced: Vec<NodeRegistration>,
    /// Registrations to declare lost: propose `NodeLost{epoch}` for each. Repeated a lease later
    /// until [`Leases::remove_node`] confirms the loss.
    pub lost: Vec<NodeRegistration>,
    /// Duration of a stall of the leader, if one occurred. Every node that is not lost has a full
    /// lease.
    pub stalled: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseRecord {
    /// Believed until this time.
    Believed { until: Timestamp },
    /// Fenced, and lost from this time on.
    Fenced { until: Timestamp },
    /// Lost, and named again at this time.
    Lost { again: Timestamp },
}

impl LeaseRecord {
    fn due(self) -> Timestamp {
        match self {
            Self::Believed { until } | Self::Fenced { until } => until,
            Self::Lost { again } => again,
        }
    }

    fn lease_state(self) -> LeaseState {
        match self {
            Self::Believed { .. } => LeaseState::Believed,
            Self::Fenced { .. } => LeaseState::Fenced,
            Self::Lost { .. } => LeaseState::Lost,
        }
    }
}

/// Leases that a leader has granted. Empty on a controller that does not lead.
#[derive(Debug, Clone)]
pub struct Leases {
    limits: LeaseLimits,
    nodes: BTreeMap<NodeName, (Epoch, LeaseRecord)>,
    /// Time of the last tick; `None` while this controller does not lead.
    ticked: Option<Timestamp>,
}

impl Leases {
    /// Creates the table of a controller that does not lead yet.
    #[must_use]
    pub fn new(limits: LeaseLimits) -> Self {
        Self { limits, nodes: BTreeMap::new(), ticked: None }
    }

    /// Starts to lead. Every live node gets a full lease, regardless of its earlier state, because
    /// the previous leader may have heard the node.
    pub fn elected(&mut self, now: Timestamp, live: impl IntoIterator<Item = NodeRegistration>) {
        self.ticked = Some(now);
        let believed = self.full(now);
        self.nodes = live.into_iter().map(|member| (member.node, (member.epoch, believed))).collect();
    }

    /// Adds a committed registration with a full lease; replaces an older registration of the same
    /// name. Ignored while this controller does not lead.
    pub fn registered(&mut self, now: Timestamp, member: NodeRegistration) {
        if self.ticked.is_none() {
            return;
        }
        let known = self.nodes.get(&member.node).map(|(epoch, _)| *epoch);
        if known.is_none_or(|known| known < member.epoch) {
            self.nodes.insert(member.node, (member.epoch, self.full(now)));
        }
    }

    /// Removes a node: its loss was committed, or the node left.
    pub fn remove_node(&mut self, node: &NodeName, epoch: Epoch) {
        if self.nodes.get(node).is_some_and(|(known, _)| *known <= epoch) {
            self.nodes.remove(node);
        }
    }

    /// Records a sign of life, of any kind, at `at`. Returns the state of the registration. A sign
    /// from before the present lease was granted does not shorten that lease.
    pub fn record_sign_of_life(&mut self, node: &NodeName, epoch: Epoch, at: Timestamp) -> LeaseState {
        let until = at + self.limits.lease;
        let Some(state) = self.state_mut(node, epoch) else { return LeaseState::Unknown };
        *state = match *state {
            LeaseRecord::Believed { until: granted } => LeaseRecord::Believed { until: granted.max(until) },
            LeaseRecord::Fenced { .. } => LeaseRecord::Believed { until },
            lost @ LeaseRecord::Lost { .. } => lost,
        };
        state.lease_state()
    }

    /// Returns the state of a registration, as of the last tick.
    #[must_use]
    pub fn lease_state(&self, node: &NodeName, epoch: Epoch) -> LeaseState {
        match self.nodes.get(node) {
            Some((known, state)) if *known == epoch => state.lease_state(),
            _ => LeaseState::Unknown,
        }
    }

    /// Ends leases, and returns the registrations to declare lost.
    pub fn tick(&mut self, now: Timestamp) -> LeaseTick {
        let Some(last) = self.ticked.replace(now) else { return LeaseTick::default() };
        let gap = now.since(last);
        if gap > self.limits.lease / 2 {
            self.grant_all(now);
            return LeaseTick { stalled: Some(gap), ..LeaseTick::default() };
        }
        let mut verdict = LeaseTick::default();
        for (node, (epoch, state)) in &mut self.nodes {
            let member = || NodeRegistration { node: node.clone(), epoch: *epoch };
            if let LeaseRecord::Believed { until } = *state
                && until <= now
            {
                verdict.fenced.push(member());
                *state = LeaseRecord::Fenced { until: until + self.limits.grace };
            }
            if !matches!(state, LeaseRecord::Believed { .. }) && state.due() <= now {
                verdict.lost.push(member());
                *state = LeaseRecord::Lost { again: now + self.limits.lease };
            }
        }
        verdict
    }

    /// Returns when to tick at the latest; `None` while this controller does not lead.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        let regular = self.ticked? + self.limits.lease / TICKS_PER_LEASE;
        Some(self.nodes.values().map(|(_, state)| state.due()).fold(regular, Timestamp::min))
    }

    fn full(&self, now: Timestamp) -> LeaseRecord {
        LeaseRecord::Believed { until: now + self.limits.lease }
    }

    fn grant_all(&mut self, now: Timestamp) {
        let full = self.full(now);
        let again = now + self.limits.lease;
        for (_, state) in self.nodes.values_mut() {
            *state =
                if matches!(state, LeaseRecord::Lost { .. }) { LeaseRecord::Lost { again } } else { full };
        }
    }

    fn state_mut(&mut self, node: &NodeName, epoch: Epoch) -> Option<&mut LeaseRecord> {
        self.nodes.get_mut(node).filter(|(known, _)| *known == epoch).map(|(_, state)| state)
    }
}
