//! The workflows of table 1, with assumed sizes and times, which the paper does not state.
//!
//! The paper states the share of data passing in the latency of `INFless+`: up to 92%, of which 29% between
//! host and functions and 63% between functions (§2.2). Media "can reach hundreds of MB". The assumed
//! batches of frames therefore have tens of MB, and inference on a V100 takes milliseconds. Both are chosen
//! such that one copy of all data at the costs of `INFless+` makes up 29% and 63% of *driving*, and 86% to
//! 92% of every workflow. No other figure was fitted.

use std::time::Duration;

use millrace_types::Bytes;

/// An output of a function that other functions of the workflow read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionOutput {
    /// The size, before the request's factor.
    pub size: Bytes,
    /// The indexes in [`ModelledWorkflow::functions`] of the functions that read the output. Each comes after the
    /// function that makes the output.
    pub takers: Vec<usize>,
}

/// A function on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkflowFunction {
    pub name: &'static str,
    /// The computing time on a V100.
    pub compute: Duration,
    /// The size of the input that the function loads from the host.
    pub loads: Bytes,
    /// The outputs for other functions.
    pub outputs: Vec<FunctionOutput>,
    /// The size of the response that the function copies to the host.
    pub response: Bytes,
    /// The percentage of requests in which the function runs. Only a function that no other function reads
    /// from may have less than 100.
    pub runs: u32,
}

/// A workflow: a graph of functions, in which each function comes before the functions that read its outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelledWorkflow {
    pub name: &'static str,
    /// The time of the workflow's CPU function, which ends before any data is on a GPU.
    pub decode: Duration,
    /// The functions on GPUs.
    pub functions: Vec<WorkflowFunction>,
}

impl ModelledWorkflow {
    /// Returns the data that passes between functions, each as the index of the maker, the index of the
    /// reader, and the size.
    pub fn edges(&self) -> impl Iterator<Item = (usize, usize, Bytes)> {
        self.functions.iter().enumerate().flat_map(|(from, function)| {
            function
                .outputs
                .iter()
                .flat_map(move |output| output.takers.iter().map(move |&to| (from, to, output.size)))
        })
    }

    /// Returns the outputs that a function reads, each as the index of the maker and the index of the output.
    #[must_use]
    pub fn inputs_of(&self, function: usize) -> Vec<(usize, usize)> {
        let makers = self.functions.iter().enumerate();
        let outputs = makers.flat_map(|(from, it)| (0..it.outputs.len()).map(move |output| (from, output)));
        outputs
            .filter(|&(from, output)| self.functions[from].outputs[output].takers.contains(&function))
            .collect()
    }
}

const fn mb(megabytes: u64) -> Bytes {
    Bytes(megabytes * 1_000_000)
}

const SMALL: Bytes = Bytes(100_000);

fn function(name: &'static str, compute_ms: f64, loads: u64) -> WorkflowFunction {
    let compute = Duration::from_secs_f64(compute_ms / 1e3);
    WorkflowFunction {
        name,
        compute,
        loads: mb(loads),
        outputs: Vec::new(),
        response: Bytes::ZERO,
        runs: 100,
    }
}

impl WorkflowFunction {
    fn gives(mut self, megabytes: u64, takers: &[usize]) -> Self {
        self.outputs.push(FunctionOutput { size: mb(megabytes), takers: takers.to_vec() });
        self
    }

    fn answers(self, response: Bytes) -> Self {
        Self { response, ..self }
    }

    fn in_percent(self, runs: u32) -> Self {
        Self { runs, ..self }
    }
}

fn workflow(name: &'static str, decode_ms: u64, functions: Vec<WorkflowFunction>) -> ModelledWorkflow {
    ModelledWorkflow { name, decode: Duration::from_millis(decode_ms), functions }
}

/// Returns traffic monitoring: a detector passes its findings, if any, to two recognisers.
#[must_use]
pub fn traffic() -> ModelledWorkflow {
    let functions = vec![
        function("preprocess", 3.0, 50).gives(60, &[1]),
        function("yolo-det", 9.0, 0).gives(25, &[2]).gives(30, &[3]),
        function("resnet-people", 5.0, 0).answers(SMALL).in_percent(85),
        function("resnet-cars", 5.0, 0).answers(SMALL).in_percent(85),
    ];
    workflow("traffic", 2, functions)
}

/// Returns auto-driving: a sequence of functions, whose frames are copied back to the host.
#[must_use]
pub fn driving() -> ModelledWorkflow {
    let functions = vec![
        function("denoise", 5.0, 50).gives(55, &[1]),
        function("yolo-seg", 10.0, 0).gives(55, &[2]),
        function("blur", 5.0, 0).answers(mb(50)),
    ];
    workflow("driving", 2, functions)
}

/// Returns video editing: three functions work on chunks in parallel, and one function reads all their
/// outputs.
#[must_use]
pub fn video() -> ModelledWorkflow {
    let face = || function("yolo-face", 10.0, 60).gives(60, &[3]);
    let functions = vec![face(), face(), face(), function("resnet", 5.0, 0).answers(mb(40))];
    workflow("video", 2, functions)
}

/// Returns image editing: two models read the same output.
#[must_use]
pub fn image() -> ModelledWorkflow {
    let functions = vec![
        function("denoise", 4.0, 40).gives(45, &[1, 2]),
        function("resnet", 6.0, 0).answers(SMALL),
        function("alexnet", 4.0, 0).answers(SMALL),
    ];
    workflow("image", 1, functions)
}

/// Returns social media: a language model reads the text that is found in a picture, if any.
#[must_use]
pub fn social() -> ModelledWorkflow {
    let functions = vec![
        function("preprocess", 2.0, 30).gives(35, &[1]),
        function("ocr", 7.0, 0).gives(10, &[2]).answers(SMALL),
        function("bert", 4.0, 0).answers(SMALL).in_percent(90),
    ];
    workflow("social", 1, functions)
}

/// Returns Yelp: two models in sequence, with embeddings between them.
#[must_use]
pub fn yelp() -> ModelledWorkflow {
    let functions =
        vec![function("bert-filter", 4.5, 16).gives(32, &[1]), function("bert-reply", 4.5, 0).answers(SMALL)];
    workflow("yelp", 0, functions)
}

/// Returns all six workflows, in the order of the table.
#[must_use]
pub fn all() -> Vec<ModelledWorkflow> {
    vec![traffic(), driving(), video(), image(), social(), yelp()]
}
