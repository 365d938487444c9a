//! `invoke`: runs a function or workflow once, on JSON, raw bytes or pictures, and prints the
//! response and the latency breakdown.

use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_client::{InferRequest, InferResponse, Inference, ModelMetadata, Tensor};
use millrace_types::function::DEFAULT_TIMEOUT;
use millrace_types::{FunctionName, InSequence, RequestId, SequenceId};

use crate::failure::CommandFailure;
use crate::output::{ListOutput, document, print, responses};
use crate::session::ClusterSession;
use crate::target::{ModelKind, model_name};
use crate::tensors::{image, json, only_input, raw};

const EXAMPLES: &str = "\
Examples:
  millrace invoke digits --image digit-3.png
  millrace invoke mlp --json '[[0.1, 0.2, 0.3]]'
  millrace invoke bert --json '{\"input_ids\": [[101, 7592, 102]], \"attention_mask\": [[1, 1, 1]]}'
  millrace invoke workflow/traffic --json @frame.json
  millrace invoke counter --json '[[1, 1, 1, 1]]' --sequence 42 --sequence-start
  millrace invoke resnet --raw x=picture.bin:FP32:1x3x224x224 -o json";

/// Run a function or workflow once.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(group(clap::ArgGroup::new("input").required(true).multiple(true)))]
pub(crate) struct Args {
    /// The function or workflow, such as digits or workflow/traffic.
    name: String,
    /// The inputs as JSON: a body of the Open Inference Protocol, {"INPUT": [...]}, or the values
    /// alone; @FILE reads a file, @- standard input.
    #[arg(long, group = "input", value_name = "JSON")]
    json: Option<String>,
    /// An input as little-endian bytes in a file; may be repeated.
    #[arg(long, group = "input", value_name = "NAME=FILE[:DTYPE:SHAPE]")]
    raw: Vec<raw::RawInput>,
    /// A PNG or JPEG file for an image model, resized to the model's input; repeated files form one batch.
    #[arg(long, group = "input", value_name = "FILE", conflicts_with_all = ["json", "raw"])]
    image: Vec<PathBuf>,
    /// The mean to subtract after the picture's values are scaled to 0..1: one number, or one for each
    /// channel.
    #[arg(
        long,
        value_name = "M",
        value_delimiter = ',',
        default_value = "0",
        requires = "image",
        allow_hyphen_values = true
    )]
    mean: Vec<f32>,
    /// The divisor of the values after the subtraction: one number, or one for each channel.
    #[arg(long, value_name = "D", value_delimiter = ',', default_value = "1", requires = "image")]
    std: Vec<f32>,
    /// The number of a picture's best classes to print.
    #[arg(long, value_name = "K", default_value_t = 3)]
    top: usize,
    /// A file with the names of the classes, one per line.
    #[arg(long, value_name = "FILE", requires = "image")]
    labels: Option<PathBuf>,
    /// The revision of the function [default: the latest].
    #[arg(long, value_name = "N", default_value = "", hide_default_value = true)]
    revision: String,
    /// The sequence of the request, if the function keeps state: a number from 1, or a text.
    #[arg(long, value_name = "ID")]
    sequence: Option<SequenceId>,
    /// Start the sequence with this request, and replace an existing one.
    #[arg(long, requires = "sequence")]
    sequence_start: bool,
    /// End the sequence with this request.
    #[arg(long, requires = "sequence")]
    sequence_end: bool,
    /// The request's id [default: a generated id].
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,
    /// The timeout of the request.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    timeout: Duration,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let (kind, name) = model_name(&args.name)?;
    let name = name.to_owned();
    if let Some(id) = &args.request_id
        && RequestId::new(id).is_none()
    {
        return Err(CommandFailure::usage(format!("{id:?} is not a valid request id"))
            .hint(format!("use 1 to {} visible ASCII characters", RequestId::LEN_MAX)));
    }
    if let Some(kind) = kind {
        check_kind(kind, &name, session).await?;
    }
    let inference = session.inference();
    let model = inference.model_metadata(&name, &args.revision).await?;
    let asked = inputs(&args, &model)?;
    let request = InferRequest {
        version: args.revision.clone(),
        id: args.request_id.clone().or(asked.id),
        timeout: args.timeout,
        priority: asked.priority,
        sequence: args.sequence.clone().map(|id| InSequence {
            id,
            start: args.sequence_start,
            end: args.sequence_end,
        }),
        outputs: asked.outputs,
        ..InferRequest::new(name, asked.inputs)
    };
    let answer = answer(&inference, request).await?;
    let shown = responses::InferResponseDocument::of(&answer);
    match document(args.output.output, &shown)? {
        Some(text) => print(&text),
        None => print(&report(&args, &answer)?),
    }
}

/// Checks the kind of a name. Functions and workflows share a name space, so the name may belong
/// to the other kind.
async fn check_kind(kind: ModelKind, name: &str, session: &ClusterSession) -> Result<(), CommandFailure> {
    let name = FunctionName::new(name).map_err(|error| CommandFailure::usage(error.to_string()))?;
    let key = session.key(&name);
    match kind {
        ModelKind::Function => session.admin.function(&key).await.map(|_| ())?,
        ModelKind::Workflow => session.admin.workflow(&key).await.map(|_| ())?,
    }
    Ok(())
}

async fn answer(inference: &Inference, request: InferRequest) -> Result<InferResponse, CommandFailure> {
    let timeout = request.timeout;
    let hint = match timeout == DEFAULT_TIMEOUT {
        true => "allow more time with --timeout, or see the GPUs' load: millrace ps".to_owned(),
        false => format!(
            "{} may be too short: see the GPUs' load with 'millrace ps'",
            humantime::format_duration(timeout)
        ),
    };
    inference.infer(request).await.map_err(|error| {
        let failure = CommandFailure::from(error);
        if failure.exit == crate::failure::ExitStatus::TimedOut { failure.hint(hint) } else { failure }
    })
}

fn inputs(args: &Args, model: &ModelMetadata) -> Result<json::JsonRequest, CommandFailure> {
    let mut asked = match &args.json {
        Some(text) => json::read(&json_text(text)?, model)?,
        None => json::JsonRequest::default(),
    };
    for input in &args.raw {
        asked.inputs.push(input.tensor(model, raw::read(&input.file)?)?);
    }
    if !args.image.is_empty() {
        asked.inputs.push(pictures(args, model)?);
    }
    Ok(asked)
}

fn json_text(text: &str) -> Result<String, CommandFailure> {
    match text.strip_prefix('@') {
        None => Ok(text.to_owned()),
        Some("-") => std::io::read_to_string(std::io::stdin())
            .map_err(|error| CommandFailure::usage(format!("cannot read standard input: {error}"))),
        Some(file) => std::fs::read_to_string(file)
            .map_err(|error| CommandFailure::usage(format!("cannot read {file}: {error}"))),
    }
}

fn pictures(args: &Args, model: &ModelMetadata) -> Result<Tensor, CommandFailure> {
    let input = only_input(model)?;
    let decode = |path: &PathBuf| image::decode(&path.display().to_string(), &raw::read(path)?);
    let pictures: Vec<_> = args.image.iter().map(decode).collect::<Result<_, _>>()?;
    let scale = image::Scale { mean: args.mean.clone(), std: args.std.clone() };
    image::tensor(&pictures, input, &scale)
}

fn report(args: &Args, answer: &InferResponse) -> Result<String, CommandFailure> {
    let labels = args.labels.as_deref().map(read_labels).transpose()?.unwrap_or_default();
    let pictures: Vec<String> = args.image.iter().map(|path| file_name(path)).collect();
    let mut lines = Vec::new();
    for output in &answer.outputs {
        let classes = responses::best_classes(output, &pictures, args.top, &labels);
        lines.extend(classes.unwrap_or_else(|| responses::values(output)));
    }
    lines.push(responses::footer(answer));
    Ok(lines.join("\n"))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn read_labels(path: &Path) -> Result<Vec<String>, CommandFailure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| CommandFailure::usage(format!("cannot read {}: {error}", path.display())))?;
    Ok(text.lines().map(str::to_owned).collect())
}
