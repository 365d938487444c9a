//! The functions that requesters use, with the expected answers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::TryStreamExt as _;
use millrace_client::{Admin, ApplyOptions, Endpoints, Error, InferRequest, Inference, Tensor};
use millrace_types::workflow::{Step, StepTarget, WorkflowOutput};
use millrace_types::{DataType, Digest, FunctionKey, FunctionName, TenantName, WorkflowSpec};
use rand::Rng as _;
use rand::rngs::StdRng;

use super::counter::CounterFunction;
use super::keys;
use super::synth::{SynthModel, synthesize, upload};
use crate::cluster::until;

/// Number of inputs of each function. Each input has its own expected answer.
const INPUTS: usize = 4;

/// The name of the function that [`Targets::poke`] writes.
pub const POKED: &str = "poked";

/// The name of the function whose long requests kill the process that runs them.
pub(crate) const POISON: &str = "poison";
/// The network of [`POISON`]: a transformer, whose runs are long for a batch of many texts.
const SLOW: [&str; 13] = [
    "bert",
    "--layers",
    "2",
    "--hidden",
    "256",
    "--heads",
    "4",
    "--inner",
    "1024",
    "--vocabulary",
    "1000",
    "--positions",
    "64",
];

/// A function that stays for the whole run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetFunction {
    pub name: String,
    /// Number of nodes that hold the model.
    pub replicas: u32,
    /// The model, which other functions may share.
    pub network: SynthModel,
}

/// A workflow that stays for the whole run, and runs functions in sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetWorkflow {
    pub name: String,
    /// The functions, each with an input `x` and an output `y`.
    pub steps: Vec<String>,
    /// Number of rows of each request.
    pub rows: u32,
}

/// The functions that stay, and the workflows over them.
#[derive(Debug, Clone)]
pub struct Targets {
    /// The model of a function.
    pub(super) model: Digest,
    pub(super) functions: Arc<Vec<FunctionExamples>>,
    /// Functions that keep state. These have their own clients.
    pub(super) counters: Arc<[CounterFunction]>,
    pokes: Arc<AtomicU64>,
    /// Number of answers to the harness's own requests, examples included.
    asked: Arc<AtomicU64>,
}

/// A function or workflow that stays for the whole run.
#[derive(Debug)]
pub(super) struct FunctionExamples {
    pub(super) name: String,
    pub(super) examples: Vec<ExampleAnswer>,
}

/// An input and its answer, recorded before the first fault.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ExampleAnswer {
    pub(super) input: Tensor,
    pub(super) outputs: Vec<Tensor>,
}

impl Targets {
    /// Publishes the functions and workflows, and records their answers.
    ///
    /// # Errors
    /// If the cluster refuses one of them, or one is not ready in time.
    pub async fn publish(
        program: &Path,
        root: &Path,
        endpoints: Endpoints,
        targets: Vec<TargetFunction>,
        chains: Vec<TargetWorkflow>,
        counters: Vec<CounterFunction>,
        rng: &mut StdRng,
    ) -> anyhow::Result<Self> {
        let admin = Admin::new(endpoints.clone());
        let mut models = BTreeMap::new();
        for &TargetFunction { ref name, replicas, network } in &targets {
            let digest = match models.entry(network) {
                Entry::Occupied(uploaded) => *uploaded.get(),
                Entry::Vacant(new) => *new.insert(upload(network, program, root, &admin).await?),
            };
            let mut spec = keys::spec(name, 0);
            spec.replicas = replicas;
            admin.apply(&spec, digest, ApplyOptions::default()).await?;
        }
        let model = *models.values().next().context("there is a function to ask")?;
        let inference = Inference::new(endpoints);
        for chain in &chains {
            admin.apply_workflow(&chain.spec()?, ApplyOptions::default()).await?;
        }
        for counter in &counters {
            counter.publish(program, root, &admin).await?;
            ready(&counter.name, &inference).await?;
        }
        let mut functions = Vec::new();
        let names = targets.into_iter().map(|target| (target.name, 1));
        for (name, rows) in names.chain(chains.into_iter().map(|chain| (chain.name, chain.rows))) {
            ready(&name, &inference).await?;
            let examples = examples(&name, rows, &inference, rng).await?;
            functions.push(FunctionExamples { name, examples });
        }
        let asked = Arc::new(AtomicU64::new((functions.len() * INPUTS) as u64));
        let functions = Arc::new(functions);
        let counters = counters.into();
        Ok(Self { model, functions, counters, pokes: Arc::default(), asked })
    }

    /// Returns the functions that keep state.
    #[must_use]
    pub fn counters(&self) -> &[CounterFunction] {
        &self.counters
    }

    /// Returns the names of the functions and workflows that keep no state.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.functions.iter().map(|target| target.name.as_str())
    }

    /// Sends a request to a function or workflow, whose answer has to be the one from before the
    /// faults.
    ///
    /// # Errors
    /// If the request fails, or the answer differs.
    pub async fn ask(&self, name: &str, endpoints: Endpoints) -> anyhow::Result<()> {
        Ok(self.try_ask(name, endpoints).await??)
    }

    /// Sends a request that may be refused: the caller judges the refusal.
    ///
    /// # Errors
    /// If the answer differs from the answer before the faults.
    pub async fn try_ask(&self, name: &str, endpoints: Endpoints) -> anyhow::Result<Result<(), Error>> {
        let function = self.functions.iter().find(|it| it.name == name);
        let example = function.and_then(|it| it.examples.first()).context("there is an example")?;
        let request = InferRequest::new(name, vec![example.input.clone()]);
        let answer = match Inference::new(endpoints).infer(request).await {
            Ok(answer) => answer,
            Err(error) => return Ok(Err(error)),
        };
        self.asked.fetch_add(1, Ordering::Relaxed);
        if answer.outputs != example.outputs {
            bail!("the answer of {name} differs from the one before the faults");
        }
        Ok(Ok(()))
    }

    /// Returns the number of answers to the harness's own requests.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Returns the number of requests that were billed to these functions so far.
    ///
    /// # Errors
    /// If the bills cannot be read.
    pub async fn billed(&self, admin: &Admin) -> Result<u64, Error> {
        let bills: Vec<_> = admin.billing(None, None).try_collect().await?;
        let own = bills.iter().filter(|bill| self.names().any(|name| name == bill.function));
        Ok(own.map(|bill| bill.requests).sum())
    }

    /// Makes a write that the oracle does not judge, because such a write may take effect late.
    ///
    /// # Errors
    /// If the write was not acknowledged.
    pub async fn poke(&self, endpoints: Endpoints) -> Result<(), Error> {
        let poke = keys::spec(POKED, self.pokes.fetch_add(1, Ordering::Relaxed));
        Admin::new(endpoints).apply(&poke, self.model, ApplyOptions::default()).await.map(drop)
    }
}

impl TargetWorkflow {
    fn spec(&self) -> anyhow::Result<WorkflowSpec> {
        let input = |at: usize| match at {
            0 => Ok("input.x".parse()?),
            at => anyhow::Ok(format!("s{}.y", at - 1).parse()?),
        };
        let step = |(at, function): (usize, &String)| {
            anyhow::Ok(Step {
                name: FunctionName::new(&format!("s{at}"))?,
                run: StepTarget::Function(FunctionName::new(function)?),
                inputs: [("x".to_owned(), input(at)?)].into(),
                each: None,
                when: None,
                deadline: None,
            })
        };
        let steps = self.steps.iter().enumerate().map(step).collect::<anyhow::Result<Vec<_>>>()?;
        let output = WorkflowOutput { name: "y".to_owned(), from: input(steps.len())? };
        let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new(&self.name)? };
        Ok(WorkflowSpec::new(key, vec!["x".to_owned()], steps, vec![output]))
    }
}

async fn ready(name: &str, inference: &Inference) -> anyhow::Result<()> {
    until(&format!("{name} is ready"), async || match inference.model_ready(name, "").await {
        Ok(true) => None,
        Ok(false) => Some("the model is not ready".to_owned()),
        Err(error) => Some(error.to_string()),
    })
    .await
}

/// Returns inputs and their answers, with this number of rows if the function accepts any number.
async fn examples(
    name: &str,
    rows: u32,
    inference: &Inference,
    rng: &mut StdRng,
) -> anyhow::Result<Vec<ExampleAnswer>> {
    let metadata = inference.model_metadata(name, "").await?;
    let [input] = metadata.inputs.as_slice() else { bail!("the model has one input") };
    let mut examples = Vec::new();
    for _ in 0..INPUTS {
        let input = random_input(&input.name, &input.shape, rows, rng)?;
        let answer = inference.infer(InferRequest::new(name, vec![input.clone()])).await?;
        examples.push(ExampleAnswer { input, outputs: answer.outputs });
    }
    Ok(examples)
}

/// Publishes [`POISON`].
///
/// # Errors
/// If the cluster refuses the function.
pub(crate) async fn publish_slow(program: &Path, root: &Path, admin: &Admin) -> anyhow::Result<()> {
    let digest = synthesize(&SLOW, program, &root.join("slow.onnx"), admin).await?;
    admin.apply(&keys::spec(POISON, 0), digest, ApplyOptions::default()).await?;
    Ok(())
}

fn random_input(name: &str, shape: &[i64], rows: u32, rng: &mut StdRng) -> anyhow::Result<Tensor> {
    let mut shape = shape.to_vec();
    if let Some(first @ ..0) = shape.first_mut() {
        *first = rows.into();
    }
    let shape: Vec<i64> = shape.iter().map(|&dimension| dimension.max(1)).collect();
    let count: i64 = shape.iter().product();
    let values = (0..count).flat_map(|_| rng.random_range(-1.0f32..1.0).to_le_bytes());
    Ok(Tensor::new(name, DataType::Fp32, shape, Bytes::from(values.collect::<Vec<u8>>()))?)
}
