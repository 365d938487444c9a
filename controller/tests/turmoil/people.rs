//! The users of the admin API: several concurrent clients that each call any controller over the
//! network and record the answers.
//!
//! The shared functions change every few seconds, so that the history of each function is short.

use std::rc::Rc;
use std::time::Duration;

use millrace_proto::admin as api;
use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::status::from_status;
use millrace_types::{Digest, Reason};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::group::Regrouping;
use crate::group::{CLIENT_PORT, LARGE_MODEL, MODEL, Outside, host};
use crate::history::{Created, RegisterAnswer, RegisterAsked, RegisterOp};
use crate::network::dial;

/// Clients that write and read shared functions.
const READERS_AND_WRITERS: u64 = 4;
/// Clients that create separate functions.
const CREATORS: u64 = 2;
/// The number of the client that changes the group.
const CHANGES_THE_GROUP: u64 = READERS_AND_WRITERS + CREATORS;
/// The time during which the same shared functions are used.
const SHARED_FOR: Duration = Duration::from_secs(2);
/// Shared functions at a time.
const SHARED_AT_A_TIME: u64 = 3;
/// A client's timeout for an answer, in milliseconds; often shorter than the controllers' own.
const PATIENCE_MS: std::ops::Range<u64> = 300..4_000;
/// A client's pause between two calls, in milliseconds.
const THINKS_MS: std::ops::Range<u64> = 5..150;
/// The pause before a membership change, in milliseconds.
const REGROUPS_AFTER_MS: std::ops::Range<u64> = 500..6_000;
/// Repeats of a call with an idempotency key.
const REPEATS_MAX: u32 = 3;
/// The timeout of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// Runs all clients until the run is calm, and then makes a last write.
pub(crate) async fn work(seed: u64, outside: Rc<Outside>) -> turmoil::Result {
    outside.formed().await;
    let mut people = JoinSet::new();
    for number in 0..READERS_AND_WRITERS {
        let person = Person::new(seed, number, &outside);
        people.spawn_local(person.reads_and_writes(number));
    }
    for number in READERS_AND_WRITERS..READERS_AND_WRITERS + CREATORS {
        let person = Person::new(seed, number, &outside);
        people.spawn_local(person.creates(number));
    }
    if let Some(change) = outside.regrouping {
        people.spawn_local(Person::new(seed, CHANGES_THE_GROUP, &outside).regroups(change));
    }
    while let Some(ended) = people.join_next().await {
        ended?;
    }
    Person::new(seed, u64::MAX, &outside).has_the_last_word().await;
    Ok(())
}

/// The outcome of a call.
enum Told<T> {
    Done(T),
    /// The answer says that nothing was changed.
    Refused(Reason),
    Unknown,
}

struct Person {
    rng: StdRng,
    clients: Vec<AdminClient<Channel>>,
    outside: Rc<Outside>,
}

impl Person {
    fn new(seed: u64, number: u64, outside: &Rc<Outside>) -> Self {
        let connect = |id| {
            let endpoint = Endpoint::from_shared(format!("http://{}:{CLIENT_PORT}", host(id))).unwrap();
            AdminClient::new(dial(&endpoint.connect_timeout(CONNECT_TIMEOUT)))
        };
        Self {
            rng: StdRng::seed_from_u64(seed ^ number.rotate_left(17)),
            clients: (1..=outside.controllers).map(connect).collect(),
            outside: Rc::clone(outside),
        }
    }

    async fn think(&mut self) {
        sleep(Duration::from_millis(self.rng.random_range(THINKS_MS))).await;
    }

    /// Calls any controller, with a random timeout.
    async fn ask<T>(
        &mut self,
        call: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Told<T> {
        let client = self.clients[self.rng.random_range(0..self.clients.len())].clone();
        let patience = Duration::from_millis(self.rng.random_range(PATIENCE_MS));
        match timeout(patience, call(client)).await {
            Err(_) => Told::Unknown,
            Ok(Ok(answer)) => Told::Done(answer.into_inner()),
            Ok(Err(status)) => {
                // A status that no controller made says nothing about the call's effect.
                let failure = from_status(&status);
                if failure.may_have_executed { Told::Unknown } else { Told::Refused(failure.reason) }
            }
        }
    }

    async fn reads_and_writes(mut self, number: u64) {
        let mut writes = 0;
        while !self.outside.is_calm() {
            self.think().await;
            if self.rng.random_ratio(1, 40) {
                let id = self.rng.random_range(0..=self.outside.controllers);
                let request = api::TransferLeadershipRequest { id };
                // The invariants check the resulting leadership, so the outcome does not matter.
                let (Told::Done(_) | Told::Refused(_) | Told::Unknown) =
                    self.ask(async |mut client| client.transfer_leadership(request).await).await;
                continue;
            }
            let period = self.outside.elapsed().as_millis() / SHARED_FOR.as_millis();
            let function = format!("shared-{period}-{}", self.rng.random_range(0..SHARED_AT_A_TIME));
            let op = match self.rng.random_range(0..10) {
                0..4 => {
                    writes += 1;
                    RegisterOp::Put(writes * READERS_AND_WRITERS + number)
                }
                4 => RegisterOp::Delete,
                _ => RegisterOp::Get,
            };
            self.use_shared(function, op).await;
        }
    }

    async fn use_shared(&mut self, function: String, op: RegisterOp) {
        let journal = self.outside.registers.clone();
        let call = journal.begin(RegisterAsked { function: function.clone(), op });
        let told = match op {
            RegisterOp::Put(value) => match self.apply(&function, value, String::new()).await {
                Told::Done(_) => Told::Done(RegisterAnswer::Done),
                Told::Refused(reason) => Told::Refused(reason),
                Told::Unknown => Told::Unknown,
            },
            RegisterOp::Delete => {
                let request = api::DeleteFunctionRequest { name: function, ..Default::default() };
                match self.ask(async |mut client| client.delete_function(request).await).await {
                    Told::Done(_) => Told::Done(RegisterAnswer::Done),
                    Told::Refused(reason) => Told::Refused(reason),
                    Told::Unknown => Told::Unknown,
                }
            }
            RegisterOp::Get => {
                let request = api::GetFunctionRequest { name: function, ..Default::default() };
                match self.ask(async |mut client| client.get_function(request).await).await {
                    Told::Done(function) => Told::Done(RegisterAnswer::Value(value(&function))),
                    Told::Refused(reason) => Told::Refused(reason),
                    Told::Unknown => Told::Unknown,
                }
            }
        };
        match told {
            Told::Done(answer) => journal.end(call, answer),
            Told::Refused(Reason::FunctionNotFound) => journal.end(call, RegisterAnswer::Absent),
            Told::Refused(_) => journal.end(call, RegisterAnswer::Refused),
            Told::Unknown => {}
        }
    }

    async fn creates(mut self, number: u64) {
        let mut count = 0;
        while !self.outside.is_calm() {
            self.think().await;
            count += 1;
            self.create(format!("own-{number}-{count}")).await;
        }
    }

    /// Creates a function. Half of the creations have an idempotency key, and are repeated until an
    /// answer arrives.
    async fn create(&mut self, name: String) -> Option<Created> {
        let journal = self.outside.creations.clone();
        let call = journal.begin(name.clone());
        let repeats = if self.rng.random() { REPEATS_MAX } else { 0 };
        let key = if repeats > 0 { name.clone() } else { String::new() };
        let mut refused = true;
        for _ in 0..=repeats {
            match self.apply(&name, 0, key.clone()).await {
                Told::Done(answer) => {
                    let created = answer.outcome() == api::ApplyOutcome::Created;
                    assert!(created, "{name} must be created once, and was {:?}", answer.outcome());
                    journal.end(call, Created::Acknowledged);
                    return Some(Created::Acknowledged);
                }
                Told::Refused(_) => {}
                Told::Unknown => refused = false,
            }
        }
        if refused {
            journal.end(call, Created::Refused);
        }
        refused.then_some(Created::Refused)
    }

    async fn apply(&mut self, name: &str, value: u64, key: String) -> Told<api::ApplyFunctionResponse> {
        // Functions that are created once matter for the log only. No node has memory for the model, so
        // the number of placements stays small.
        let (model, replicas) = if name.starts_with("shared") { (MODEL, 2) } else { (LARGE_MODEL, 1) };
        let spec = api::FunctionSpec {
            name: name.to_owned(),
            replicas,
            labels: [("value".to_owned(), value.to_string())].into(),
            ..Default::default()
        };
        let request = api::ApplyFunctionRequest {
            spec: Some(spec),
            digest: Digest::of(model).to_string(),
            idempotency_key: key,
            ..Default::default()
        };
        self.ask(async |mut client| client.apply_function(request).await).await
    }

    /// Lets a controller join, maybe promotes the controller, and maybe removes another controller,
    /// repeating each step until success.
    async fn regroups(mut self, change: Regrouping) {
        let Regrouping { joins, promotes, removes } = change;
        sleep(Duration::from_millis(self.rng.random_range(REGROUPS_AFTER_MS))).await;
        self.outside.joining.set(true);
        while !self.outside.has_entered(joins) {
            self.think().await;
        }
        if promotes {
            self.until_done(async move |mut client| {
                client.promote_controller(api::PromoteControllerRequest { id: joins, no_wait: false }).await
            })
            .await;
            sleep(Duration::from_millis(self.rng.random_range(REGROUPS_AFTER_MS))).await;
        }
        if let Some(id) = removes {
            self.until_done(async move |mut client| {
                let request = api::RemoveControllerRequest { id, no_wait: false };
                match client.remove_controller(request).await {
                    Err(status) if status.message().contains("there is no controller") => {
                        // An earlier attempt succeeded without an answer.
                        Ok(Response::new(api::ChangeMembershipResponse::default()))
                    }
                    Err(status) if status.message().contains("transfer leadership first") => {
                        // The next attempt shows whether the transfer succeeded in time.
                        drop(client.transfer_leadership(api::TransferLeadershipRequest { id: 0 }).await);
                        Err(status)
                    }
                    answered => answered,
                }
            })
            .await;
            self.outside.retired.set(Some(id));
        }
    }

    async fn until_done(
        &mut self,
        call: impl AsyncFn(AdminClient<Channel>) -> Result<Response<api::ChangeMembershipResponse>, Status>,
    ) {
        while !matches!(self.ask(&call).await, Told::Done(_)) {
            self.think().await;
        }
        self.outside.regrouped.set(self.outside.regrouped.get() + 1);
    }

    /// Makes a write that must be acknowledged, because everything is repaired.
    async fn has_the_last_word(mut self) {
        for attempt in 0.. {
            let name = format!("last-{attempt}");
            if self.create(name.clone()).await == Some(Created::Acknowledged) {
                self.outside.last_word.replace(Some(name));
                return;
            }
            self.think().await;
        }
    }
}

fn value(function: &api::Function) -> u64 {
    let labels = function.spec.as_ref().map(|spec| &spec.labels);
    labels.and_then(|labels| labels.get("value")).expect("every spec has one").parse().unwrap()
}
