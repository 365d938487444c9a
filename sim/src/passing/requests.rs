//! What is known of requests and of the data they make.

use std::collections::BTreeMap;

use millrace_types::{Bytes, Timestamp};
use rand::Rng as _;

use super::fabric::Site;
use super::outcome::Split;
use super::setup::Setup;
use crate::workload::random;

/// A piece of data, as the stores name it.
pub(super) type Key = u64;

/// A request's run of one function.
#[derive(Debug, Clone, Default)]
pub(super) struct Call {
    /// Whether it runs at all.
    pub(super) runs: bool,
    /// How many inputs are not there yet, the request's own counted as one.
    pub(super) missing: usize,
    /// Its inputs, where they are there.
    pub(super) inputs: Vec<Key>,
    /// The longest way up to where it is now.
    pub(super) way: Split,
    /// When it had computed.
    pub(super) computed: Timestamp,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) app: usize,
    pub(super) replica: usize,
    pub(super) arrived: Timestamp,
    pub(super) factor: f64,
    pub(super) calls: Vec<Call>,
    /// Calls and responses that have not ended.
    pub(super) open: usize,
    pub(super) longest: Split,
    pub(super) loading: f64,
}

impl Request {
    /// What is random of a request depends on the seed and its number alone, so it is the same for
    /// every system.
    pub(super) fn new(setup: &Setup, number: usize, app: usize, replica: usize, arrived: Timestamp) -> Self {
        let mut rng = random(setup.seed, 1000 + number as u64);
        let factor = rng.random_range(setup.sizes.0..=setup.sizes.1);
        let workflow = &setup.apps[app].workflow;
        let mut calls = Vec::new();
        for (place, function) in workflow.functions.iter().enumerate() {
            let runs = rng.random_range(0..100) < function.runs;
            let missing = workflow.inputs_of(place).len() + usize::from(function.loads > Bytes::ZERO);
            calls.push(Call { runs, missing, ..Call::default() });
        }
        let responds = |place: usize| calls[place].runs && workflow.functions[place].response > Bytes::ZERO;
        let responses = (0..calls.len()).filter(|&place| responds(place)).count();
        let open = calls.iter().filter(|call| call.runs).count() + responses;
        let longest = Split { compute: workflow.decode.as_secs_f64(), ..Split::default() };
        Self { app, replica, arrived, factor, calls, open, longest, loading: 0.0 }
    }

    /// What a size comes to in this request.
    pub(super) fn scaled(&self, size: Bytes) -> Bytes {
        Bytes((size.0 as f64 * self.factor) as u64)
    }
}

/// A piece of data between functions.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) request: usize,
    pub(super) maker: usize,
    pub(super) size: Bytes,
    /// Where it was made.
    pub(super) site: Site,
    /// Functions that will read it, by the place under which the store knows them.
    pub(super) takers: Vec<usize>,
    /// How many have not.
    pub(super) unread: usize,
}

pub(super) type Objects = BTreeMap<Key, Object>;
