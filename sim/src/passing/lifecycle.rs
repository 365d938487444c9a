//! The way of a request through the instances of functions: the request arrives, waits for an instance
//! of each function, fetches the inputs, computes, and stores the outputs.

use std::time::Duration;

use millrace_core::ids::ObjectKey;
use millrace_memory::elastic::{ConsumerDistance, Event};
use millrace_transfers::paths::HostDirection;
use millrace_types::Bytes;

use super::error::Error;
use super::fabric::{GpuSite, TransferStep};
use super::instances::{CourseEnd, Instance, Job};
use super::outcome::{PathBreakdown, SimulatedWorkflow};
use super::requests::{Request, SimulatedObject, SimulatedObjectKey};
use super::run::DataflowRun;

impl DataflowRun<'_> {
    fn seconds(&self) -> f64 {
        self.now().as_nanos() as f64 / 1e9
    }

    fn compute(&self, app: usize, function: usize) -> Duration {
        self.setup.apps[app].workflow.functions[function].compute.mul_f64(self.setup.compute)
    }

    fn decode(&self, app: usize) -> Duration {
        self.setup.apps[app].workflow.decode.mul_f64(self.setup.compute)
    }

    /// Creates a request of an app. The replicas of an app get the requests in turns.
    pub(super) fn arrive(&mut self, app: usize) {
        let number = self.requests.len();
        let replica = self.turns[app] % self.by_place[app].len();
        self.turns[app] += 1;
        self.requests.push(Request::new(self.setup, number, app, replica, self.now()));
        let decode = self.decode(app);
        self.fabric.begin(CourseEnd::Decoded(number), [TransferStep::Wait(decode)]);
    }

    fn instance_of(&self, request: usize, function: usize) -> usize {
        let it = &self.requests[request];
        self.by_place[it.app][it.replica][function]
    }

    pub(super) fn ended(&mut self, tag: CourseEnd) -> Result<(), Error> {
        match tag {
            CourseEnd::Decoded(request) => {
                let app = self.requests[request].app;
                let decode =
                    PathBreakdown { compute: self.decode(app).as_secs_f64(), ..PathBreakdown::default() };
                for function in 0..self.requests[request].calls.len() {
                    if self.setup.apps[app].workflow.functions[function].loads > Bytes::ZERO {
                        self.there(request, function, None, decode)?;
                    }
                }
                Ok(())
            }
            CourseEnd::Loaded(instance, first) => {
                let took = self.took(instance);
                if let Some(job) = &mut self.instances[instance].job {
                    job.loads = job.loads.max(took);
                    self.requests[job.request].loading += took - first.as_secs_f64();
                }
                self.arrived(instance)
            }
            CourseEnd::Fetched(instance) => {
                let took = self.took(instance);
                if let Some(job) = &mut self.instances[instance].job {
                    job.fetches = job.fetches.max(took);
                }
                self.arrived(instance)
            }
            CourseEnd::Released(instance) => {
                self.begin_compute(instance);
                Ok(())
            }
            CourseEnd::Computed(instance) => self.computed(instance),
            CourseEnd::Stored(key) => self.stored(key),
            CourseEnd::Responded { request, function } => self.responded(request, function),
            CourseEnd::Migrated(site, key) => self.tell(site, Event::Migrated { object: ObjectKey(key) }),
            CourseEnd::Reloaded(site, key) => self.tell(site, Event::Reloaded { object: ObjectKey(key) }),
            CourseEnd::Refused(site, key) => {
                self.tell(site, Event::Migrated { object: ObjectKey(key) })?;
                self.announce(key)
            }
        }
    }

    fn took(&self, instance: usize) -> f64 {
        self.instances[instance].job.map_or(0.0, |job| self.seconds() - job.began)
    }

    /// Records that an input of a call is ready. Once all inputs are ready, the call enters its instance's
    /// queue.
    fn there(
        &mut self,
        request: usize,
        function: usize,
        key: Option<SimulatedObjectKey>,
        way: PathBreakdown,
    ) -> Result<(), Error> {
        let call = &mut self.requests[request].calls[function];
        call.missing -= 1;
        call.inputs.extend(key);
        if way.total() > call.way.total() {
            call.way = way;
        }
        if call.missing > 0 {
            return Ok(());
        }
        let instance = self.instance_of(request, function);
        let site = self.instances[instance].site;
        let index = self.instances[instance].index();
        self.instances[instance].queue.insert(request);
        if !self.is_host_oriented() {
            self.tell(site, Event::Requested { function: index })?;
            self.consumer_moved(request, function, ConsumerDistance::Queued(request as u64))?;
        }
        self.start(instance)
    }

    /// Reports the state of a call to the stores of its inputs.
    fn consumer_moved(
        &mut self,
        request: usize,
        function: usize,
        distance: ConsumerDistance,
    ) -> Result<(), Error> {
        for key in self.requests[request].calls[function].inputs.clone() {
            let Some(object) = self.objects.get(&key) else { continue };
            let Some(consumer) = object.takers.iter().position(|&taker| taker == function) else { continue };
            let event = Event::ConsumerMoved { object: ObjectKey(key), consumer, distance };
            self.tell(object.site, event)?;
        }
        Ok(())
    }

    /// Begins the first call of the queue, if the instance is free.
    fn start(&mut self, instance: usize) -> Result<(), Error> {
        if self.instances[instance].job.is_some() {
            return Ok(());
        }
        let Some(request) = self.instances[instance].queue.pop_first() else { return Ok(()) };
        let Instance { app, function, site, .. } = self.instances[instance];
        if !self.is_host_oriented() {
            self.consumer_moved(request, function, ConsumerDistance::Claimed)?;
        }
        let compute = self.compute(app, function);
        let loads = self.requests[request].scaled(self.setup.apps[app].workflow.functions[function].loads);
        let inputs = self.requests[request].calls[function].inputs.clone();
        let pending = inputs.len() + usize::from(loads > Bytes::ZERO);
        let began = self.seconds();
        self.instances[instance].job = Some(Job { request, pending, began, ..Job::default() });
        if loads > Bytes::ZERO {
            let (first, steps) = self.host_steps(site, HostDirection::ToGpu, loads, compute);
            self.fabric.begin(CourseEnd::Loaded(instance, first), steps);
        }
        for key in inputs {
            let steps = self.fetch_steps(site, key, compute);
            self.fabric.begin(CourseEnd::Fetched(instance), steps);
        }
        Ok(())
    }

    /// Records the end of a copy to an instance. After the last copy, the instance has read its inputs.
    fn arrived(&mut self, instance: usize) -> Result<(), Error> {
        let Some(job) = &mut self.instances[instance].job else { return Ok(()) };
        job.pending -= 1;
        if job.pending > 0 {
            return Ok(());
        }
        let job = *job;
        let function = self.instances[instance].function;
        let inputs = std::mem::take(&mut self.requests[job.request].calls[function].inputs);
        let mut wait = Duration::ZERO;
        for &key in &inputs {
            wait += self.read(key, function)?;
        }
        let way = &mut self.requests[job.request].calls[function].way;
        // Copies from the host and from other functions run at the same time, so the longer copy counts.
        if job.loads > job.fetches {
            way.host += job.loads;
        } else {
            way.functions += job.fetches;
        }
        way.functions += wait.as_secs_f64();
        self.fabric.begin(CourseEnd::Released(instance), [TransferStep::Wait(wait)]);
        Ok(())
    }

    /// Records that a function has read an object. The last reader frees the object (D28). Returns the time
    /// of native calls that the function waits for.
    fn read(&mut self, key: SimulatedObjectKey, function: usize) -> Result<Duration, Error> {
        let Some(object) = self.objects.get_mut(&key) else { return Ok(Duration::ZERO) };
        object.unread -= 1;
        let site = object.site;
        let unread = object.unread;
        let consumer = object.takers.iter().position(|&taker| taker == function).unwrap_or(0);
        if unread == 0 {
            self.objects.remove(&key);
        }
        if self.is_host_oriented() {
            return Ok(Duration::ZERO);
        }
        let told = self.stores.handle_event(
            self.now(),
            site,
            Event::Consumed { object: ObjectKey(key), consumer },
        )?;
        self.want(site, &told.wanted, Duration::ZERO);
        Ok(told.wait)
    }

    fn begin_compute(&mut self, instance: usize) {
        let compute = self.compute(self.instances[instance].app, self.instances[instance].function);
        self.fabric.begin(CourseEnd::Computed(instance), [TransferStep::Wait(compute)]);
    }

    fn computed(&mut self, instance: usize) -> Result<(), Error> {
        let Instance { app, function, site, job: Some(Job { request, .. }), .. } = self.instances[instance]
        else {
            return Ok(());
        };
        let now = self.now();
        let compute = self.compute(app, function);
        let is_host_oriented = self.is_host_oriented();
        let call = &mut self.requests[request].calls[function];
        call.way.compute += compute.as_secs_f64();
        call.computed = now;
        let spec = self.setup.apps[app].workflow.functions[function].clone();
        let mut pending = 0;
        let mut keys = Vec::new();
        for output in &spec.outputs {
            let runs = |taker: &&usize| self.requests[request].calls[**taker].runs;
            let takers: Vec<usize> = output.takers.iter().filter(runs).copied().collect();
            if takers.is_empty() {
                continue;
            }
            self.last_key += 1;
            let size = self.requests[request].scaled(output.size);
            let unread = takers.len();
            let object = SimulatedObject { request, maker: function, size, site, takers, unread };
            self.objects.insert(self.last_key, object);
            keys.push(self.last_key);
            pending += 1;
        }
        if spec.response > Bytes::ZERO {
            let bytes = self.requests[request].scaled(spec.response);
            let (_, steps) = self.host_steps(site, HostDirection::FromGpu, bytes, Duration::ZERO);
            self.fabric.begin(CourseEnd::Responded { request, function }, steps);
            // With a store on the GPU, the store's daemon copies the response, so the instance does not wait.
            pending += usize::from(is_host_oriented);
        }
        if let Some(job) = &mut self.instances[instance].job {
            job.pending = pending;
        }
        for key in keys {
            self.publish(site, key, instance)?;
        }
        if !is_host_oriented {
            let function = self.instances[instance].index();
            self.tell(site, Event::Executed { function })?;
        }
        self.close(request, function, None)?;
        if pending == 0 { self.free(instance) } else { Ok(()) }
    }

    /// Stores an output where other functions can read it.
    fn publish(&mut self, site: GpuSite, key: SimulatedObjectKey, instance: usize) -> Result<(), Error> {
        let Some(object) = self.objects.get(&key) else { return Ok(()) };
        let size = object.size;
        if self.is_host_oriented() {
            let (_, steps) = self.host_steps(site, HostDirection::FromGpu, size, Duration::ZERO);
            self.fabric.begin(CourseEnd::Stored(key), steps);
            return Ok(());
        }
        let consumers = vec![ConsumerDistance::Unqueued; object.takers.len()];
        let function = self.instances[instance].index();
        self.tell(site, Event::Store { object: ObjectKey(key), function, size, consumers })
    }

    fn stored(&mut self, key: SimulatedObjectKey) -> Result<(), Error> {
        if !self.is_host_oriented()
            && let Some(object) = self.objects.get(&key)
        {
            self.tell(object.site, Event::Filled { object: ObjectKey(key) })?;
        }
        self.announce(key)
    }

    /// Marks an object as ready for all functions that read it, and ends the maker's wait for the object.
    fn announce(&mut self, key: SimulatedObjectKey) -> Result<(), Error> {
        let Some(object) = self.objects.get(&key) else { return Ok(()) };
        let &SimulatedObject { request, maker, .. } = object;
        let takers = object.takers.clone();
        let call = &self.requests[request].calls[maker];
        let mut way = call.way;
        way.functions += self.now().since(call.computed).as_secs_f64();
        for taker in takers {
            self.there(request, taker, Some(key), way)?;
        }
        self.done_one(self.instance_of(request, maker))
    }

    /// Records the end of a copy that an instance waited for. The last end frees the instance.
    fn done_one(&mut self, instance: usize) -> Result<(), Error> {
        let Some(job) = &mut self.instances[instance].job else { return Ok(()) };
        job.pending -= 1;
        if job.pending == 0 { self.free(instance) } else { Ok(()) }
    }

    fn free(&mut self, instance: usize) -> Result<(), Error> {
        self.instances[instance].job = None;
        self.start(instance)
    }

    fn responded(&mut self, request: usize, function: usize) -> Result<(), Error> {
        let took = self.now().since(self.requests[request].calls[function].computed);
        self.close(request, function, Some(took))?;
        if self.is_host_oriented() { self.done_one(self.instance_of(request, function)) } else { Ok(()) }
    }

    /// Records the end of a call or of its response. The last end ends the request.
    fn close(&mut self, request: usize, function: usize, response: Option<Duration>) -> Result<(), Error> {
        let now = self.now();
        let it = &mut self.requests[request];
        let mut way = it.calls[function].way;
        way.host += response.unwrap_or_default().as_secs_f64();
        if way.total() > it.longest.total() {
            it.longest = way;
        }
        it.open -= 1;
        if it.open == 0 {
            self.records.push(SimulatedWorkflow {
                app: it.app,
                arrived: it.arrived,
                finished: now,
                split: it.longest,
                loading: it.loading,
            });
        }
        Ok(())
    }
}
