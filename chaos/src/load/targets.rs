//! The functions that requests are for, and what each has to answer.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::TryStreamExt as _;
use millrace_client::{Admin, ApplyOptions, Endpoints, Error, InferRequest, Inference, ModelFile, Tensor};
use millrace_types::workflow::{Output, Run, Step};
use millrace_types::{DataType, Digest, FunctionKey, FunctionName, TenantName, WorkflowSpec};
use rand::Rng as _;
use rand::rngs::StdRng;
use tokio::process::Command;

use super::counting::Counter;
use super::keys;
use crate::cluster::until;

/// Different inputs of each function, each with its answer.
const INPUTS: usize = 4;

/// The function that [`Targets::poke`] writes.
pub const POKED: &str = "poked";

/// The function whose long requests kill whoever runs them.
pub(crate) const POISON: &str = "poison";
/// Its network: a transformer, whose runs take long for a batch of many texts.
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

/// A function that is to stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// The nodes that keep its model.
    pub replicas: u32,
    /// Its model, which others may have too.
    pub network: Network,
}

/// A workflow that is to stay: functions one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// The functions, each of which takes `x` and gives `y`.
    pub steps: Vec<String>,
    /// How many rows its requests have.
    pub rows: u32,
}

/// A model, as `millrace synth` writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Network {
    /// Its kind. It has one FP32 input.
    pub kind: &'static str,
    /// Where its weights begin: another seed is another file, which answers otherwise.
    pub seed: u64,
}

/// The functions that stay, and the workflows over them.
#[derive(Debug, Clone)]
pub struct Targets {
    /// The model of one of them.
    pub(super) model: Digest,
    pub(super) functions: Arc<Vec<Function>>,
    /// Functions that keep state, which have clients of their own.
    pub(super) counters: Arc<[Counter]>,
    pokes: Arc<AtomicU64>,
    /// Answers that the harness itself asked for, examples included.
    asked: Arc<AtomicU64>,
}

/// A function or workflow that stays.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) examples: Vec<Example>,
}

/// An input and its answer, from before any fault.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Example {
    pub(super) input: Tensor,
    pub(super) outputs: Vec<Tensor>,
}

impl Targets {
    /// Publishes the functions and workflows, and learns what they answer.
    ///
    /// # Errors
    /// When the cluster refuses, or one of them is not ready in time.
    pub async fn publish(
        program: &Path,
        root: &Path,
        endpoints: Endpoints,
        (targets, chains, counters): (Vec<Target>, Vec<Chain>, Vec<Counter>),
        rng: &mut StdRng,
    ) -> anyhow::Result<Self> {
        let admin = Admin::new(endpoints.clone());
        let mut models = BTreeMap::new();
        for &Target { ref name, replicas, network } in &targets {
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
            functions.push(Function { name, examples });
        }
        let asked = Arc::new(AtomicU64::new((functions.len() * INPUTS) as u64));
        let (functions, counters) = (Arc::new(functions), counters.into());
        Ok(Self { model, functions, counters, pokes: Arc::default(), asked })
    }

    /// The functions that keep state.
    #[must_use]
    pub fn counters(&self) -> &[Counter] {
        &self.counters
    }

    /// The names of those that keep none.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.functions.iter().map(|target| target.name.as_str())
    }

    /// A request to one function, which has to be answered as before any fault.
    ///
    /// # Errors
    /// When it is not.
    pub async fn ask(&self, name: &str, endpoints: Endpoints) -> anyhow::Result<()> {
        Ok(self.try_ask(name, endpoints).await??)
    }

    /// The same, which may be refused: the refusal is for the caller to judge.
    ///
    /// # Errors
    /// When it is answered otherwise than before.
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
            bail!("{name} answers otherwise than before");
        }
        Ok(Ok(()))
    }

    /// How many answers the harness itself asked for.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// The requests that all of them were billed for so far.
    ///
    /// # Errors
    /// When the bills cannot be read.
    pub async fn billed(&self, admin: &Admin) -> Result<u64, Error> {
        let bills: Vec<_> = admin.billing(None, None).try_collect().await?;
        let own = bills.iter().filter(|bill| self.names().any(|name| name == bill.function));
        Ok(own.map(|bill| bill.requests).sum())
    }

    /// A write that nobody judges: it may come into force late, and never matters.
    ///
    /// # Errors
    /// When it was not acknowledged.
    pub async fn poke(&self, endpoints: Endpoints) -> Result<(), Error> {
        let poke = keys::spec(POKED, self.pokes.fetch_add(1, Ordering::Relaxed));
        Admin::new(endpoints).apply(&poke, self.model, ApplyOptions::default()).await.map(drop)
    }
}

impl Chain {
    fn spec(&self) -> anyhow::Result<WorkflowSpec> {
        let input = |at: usize| match at {
            0 => Ok("input.x".parse()?),
            at => anyhow::Ok(format!("s{}.y", at - 1).parse()?),
        };
        let step = |(at, function): (usize, &String)| {
            anyhow::Ok(Step {
                name: FunctionName::new(&format!("s{at}"))?,
                run: Run::Function(FunctionName::new(function)?),
                inputs: [("x".to_owned(), input(at)?)].into(),
                each: None,
                when: None,
                deadline: None,
            })
        };
        let steps = self.steps.iter().enumerate().map(step).collect::<anyhow::Result<Vec<_>>>()?;
        let output = Output { name: "y".to_owned(), from: input(steps.len())? };
        let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new(&self.name)? };
        Ok(WorkflowSpec::new(key, vec!["x".to_owned()], steps, vec![output]))
    }
}

async fn ready(name: &str, inference: &Inference) -> anyhow::Result<()> {
    until(&format!("{name} is ready"), async || match inference.model_ready(name, "").await {
        Ok(true) => None,
        Ok(false) => Some("it is not".to_owned()),
        Err(error) => Some(error.to_string()),
    })
    .await
}

/// What a function answers to some inputs of so many rows, where it takes any number.
async fn examples(
    name: &str,
    rows: u32,
    inference: &Inference,
    rng: &mut StdRng,
) -> anyhow::Result<Vec<Example>> {
    let metadata = inference.model_metadata(name, "").await?;
    let [input] = metadata.inputs.as_slice() else { bail!("the model has one input") };
    let mut examples = Vec::new();
    for _ in 0..INPUTS {
        let input = random_input(&input.name, &input.shape, rows, rng)?;
        let answer = inference.infer(InferRequest::new(name, vec![input.clone()])).await?;
        examples.push(Example { input, outputs: answer.outputs });
    }
    Ok(examples)
}

/// Has the cluster's own generator of models write one, and uploads it.
async fn upload(network: Network, program: &Path, root: &Path, admin: &Admin) -> anyhow::Result<Digest> {
    let Network { kind, seed } = network;
    let path = root.join(format!("{kind}-{seed}.onnx"));
    synthesize(&[kind, "--seed", &seed.to_string()], program, &path, admin).await
}

/// Publishes [`POISON`].
///
/// # Errors
/// When the cluster refuses it.
pub(crate) async fn publish_slow(program: &Path, root: &Path, admin: &Admin) -> anyhow::Result<()> {
    let digest = synthesize(&SLOW, program, &root.join("slow.onnx"), admin).await?;
    admin.apply(&keys::spec(POISON, 0), digest, ApplyOptions::default()).await?;
    Ok(())
}

pub(super) async fn synthesize(
    words: &[&str],
    program: &Path,
    path: &Path,
    admin: &Admin,
) -> anyhow::Result<Digest> {
    let mut command = Command::new(program);
    // The user's own settings must not reach it: MILLRACE_BINARY, which is ours, is none it knows.
    command.env_clear().arg("synth").args(words).arg("--out").arg(path).stdin(Stdio::null());
    let output = command.output().await.with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!("'millrace synth' fails: {}", String::from_utf8_lossy(&output.stderr));
    }
    let file = ModelFile::open(path)?;
    admin.upload(&file, |_| {}).await.context("the model is not taken")?;
    // The cluster has it now, and hundreds of them are gigabytes.
    std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(file.digest())
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
