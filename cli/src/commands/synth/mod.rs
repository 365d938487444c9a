//! `synth`: writes an untrained ONNX network, for tests, measurements and examples.

mod drawing;
mod file;
mod workflow;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use millrace_model::synth::{Encoder, Seeded, counter, detector};
use millrace_types::manifest::API_VERSION;

use crate::failure::CommandFailure;
use crate::output::print;

const EXAMPLES: &str = "\
Examples:
  millrace synth resnet50
  millrace synth bert --layers 4 --out small.onnx --function > small.yaml
  millrace synth mlp --function | millrace apply -f -
  millrace synth tiny-cnn --seed 7 --out seventh.onnx
  millrace synth counter --function | millrace apply -f -
  millrace synth detector --out examples/traffic/detector.onnx
  millrace synth workflow yelp --out examples/workflows/models";

/// The manifest's declaration of the counter's state.
const COUNTER_STATE: &str = "  sequences:\n    state: [{input: h_in, output: h_out}]\n";

/// Write an untrained ONNX network; equal options give equal files.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    network: Kind,
    /// The file to write, or the folder for a workflow's files [default: NETWORK.onnx, or models].
    #[arg(short, long, global = true, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The seed of the random weights; another seed gives a file with other results. The counter
    /// and the detector have no random weights.
    #[arg(long, global = true, value_name = "N", default_value_t = Seeded::default().0)]
    seed: u64,
    /// Also print a manifest of a function with the network.
    #[arg(long, global = true)]
    function: bool,
}

#[derive(Debug, Subcommand)]
enum Kind {
    #[command(flatten)]
    One(Network),
    /// All networks of a workflow of examples/workflows, and inputs for it.
    Workflow(workflow::Args),
}

#[derive(Debug, Subcommand)]
enum Network {
    /// A perceptron, 64-64-64: 8,320 parameters.
    Mlp,
    /// A small convolutional network: 1.8 million parameters.
    TinyCnn,
    /// One block of a transformer: 1.8 million parameters.
    Transformer,
    /// A network like ResNet-50: 25.6 million parameters.
    Resnet50,
    /// Keeps state between the requests of a sequence: halves it, and adds the input.
    Counter(Width),
    /// Finds red and blue squares in a frame of 512×512 pixels: fixed weights, for
    /// examples/traffic.
    Detector,
    /// A network like BERT-base: 109.5 million parameters, unless its dimensions are changed.
    Bert(Dimensions),
}

#[derive(Debug, clap::Args)]
struct Width {
    /// The number of independent counters.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least_one)]
    width: usize,
}

#[derive(Debug, clap::Args)]
struct Dimensions {
    /// The number of blocks of attention and feed-forward network.
    #[arg(long, value_name = "N", default_value_t = Encoder::BASE.layers, value_parser = at_least_one)]
    layers: usize,
    /// The width of a token's vector.
    #[arg(long, value_name = "N", default_value_t = Encoder::BASE.hidden, value_parser = at_least_one)]
    hidden: usize,
    /// The number of attention heads, a divisor of the width.
    #[arg(long, value_name = "N", default_value_t = Encoder::BASE.heads, value_parser = at_least_one)]
    heads: usize,
    /// The width inside the feed-forward network.
    #[arg(long, value_name = "N", default_value_t = Encoder::BASE.inner, value_parser = at_least_one)]
    inner: usize,
    /// The number of different tokens.
    #[arg(long, value_name = "N", default_value_t = Encoder::BASE.vocabulary, value_parser = at_least_one)]
    vocabulary: usize,
    /// The longest text, in tokens.
    #[arg(long, value_name = "N", default_value_t = Encoder::BASE.positions, value_parser = at_least_one)]
    positions: usize,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    let (name, onnx) = match &args.network {
        Kind::Workflow(_) if args.function => {
            return Err(CommandFailure::usage(
                "--function does not apply to a workflow, which has several functions",
            )
            .hint("its manifest is examples/workflows/NAME.yaml"));
        }
        Kind::Workflow(workflow) => {
            let folder = args.out.as_deref().unwrap_or(Path::new("models"));
            return workflow.write(folder, args.seed);
        }
        Kind::One(network) => network.build(Seeded(args.seed))?,
    };
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.onnx")));
    file::write(&out, &onnx)?;
    let state = if let Kind::One(Network::Counter(_)) = &args.network { COUNTER_STATE } else { "" };
    if args.function { print(&manifest(name, &out, state)) } else { Ok(()) }
}

impl Network {
    /// Builds the network. Returns the name and the file.
    fn build(&self, seeded: Seeded) -> Result<(&'static str, Vec<u8>), CommandFailure> {
        Ok(match self {
            Self::Mlp => ("mlp", seeded.mlp()),
            Self::TinyCnn => ("tiny-cnn", seeded.tiny_cnn()),
            Self::Transformer => ("transformer", seeded.transformer_block()),
            Self::Resnet50 => ("resnet50", seeded.resnet50_like()),
            Self::Counter(Width { width }) => ("counter", counter(*width)),
            Self::Detector => ("detector", detector()),
            Self::Bert(dimensions) => ("bert", seeded.bert_like(dimensions.encoder()?)),
        })
    }
}

impl Dimensions {
    fn encoder(&self) -> Result<Encoder, CommandFailure> {
        let &Self { layers, hidden, heads, inner, vocabulary, positions } = self;
        if !hidden.is_multiple_of(heads) {
            return Err(CommandFailure::usage(format!("{heads} heads do not divide a width of {hidden}"))
                .hint("change --heads or --hidden"));
        }
        Ok(Encoder { layers, hidden, heads, inner, vocabulary, positions })
    }
}

/// Returns a function's manifest with the declaration of its state.
fn manifest(name: &str, file: &Path, state: &str) -> String {
    // A JSON string is a YAML string too, whatever the path contains.
    let file = serde_json::Value::from(file.to_string_lossy());
    format!(
        "apiVersion: {API_VERSION}\nkind: Function\nmetadata:\n  name: {name}\nspec:\n  runtime: onnx\n  model: {{file: {file}}}\n{state}"
    )
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| "write a whole number from 1".to_owned())
}

#[cfg(test)]
mod tests {
    use millrace_types::manifest::ModelSource;

    use super::*;

    #[test]
    fn a_manifest_round_trips_with_any_path() {
        let path = "some where/it's: a \"file\".onnx";
        let read = millrace_types::manifest::parse(&manifest("tiny-cnn", Path::new(path), ""))
            .unwrap()
            .remove(0)
            .function()
            .unwrap();
        let model = ModelSource::File { path: path.into(), declared: None };
        assert_eq!((read.spec.key.name.as_str(), read.model), ("tiny-cnn", model));
    }

    #[test]
    fn the_counters_manifest_declares_the_state_of_the_model() {
        let text = manifest("counter", Path::new("counter.onnx"), COUNTER_STATE);
        let read = millrace_types::manifest::parse(&text).unwrap().remove(0).function().unwrap();
        let summary = millrace_model::compile(&counter(4).into()).unwrap().summary;
        let model =
            millrace_types::workflow::SignatureRef { inputs: &summary.inputs, outputs: &summary.outputs };
        let states = read.spec.sequences.unwrap().states(model).unwrap();
        assert_eq!(states.iter().map(|state| state.bytes).collect::<Vec<_>>(), [16]);
    }

    #[test]
    fn weights_depend_only_on_the_seed() {
        let build = |seed| Network::Mlp.build(Seeded(seed)).unwrap().1;
        assert_eq!(build(7), build(7));
        assert_ne!(build(7), build(8));
    }

    #[test]
    fn heads_that_do_not_divide_the_width_are_refused() {
        let dimensions =
            |hidden, heads| Dimensions { layers: 1, hidden, heads, inner: 16, vocabulary: 10, positions: 8 };
        assert!(dimensions(16, 4).encoder().is_ok());
        assert!(dimensions(16, 3).encoder().unwrap_err().hint.is_some());
    }
}
