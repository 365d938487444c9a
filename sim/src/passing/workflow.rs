//! The workflows of table 1, with sizes and times that the paper does not give.
//!
//! What it gives is `INFless+`'s share of data passing: up to 92% of the latency, 29% between host and
//! functions and 63% between functions (§2.2). Media "can reach hundreds of MB". So: batches of frames
//! of tens of MB, times of inference on a V100 of milliseconds, such that one copy of everything at
//! what `INFless+` pays for it comes to 29% and 63% of *driving*, and to 86% to 92% in all. Nothing
//! else was looked at.

use std::time::Duration;

use millrace_types::Bytes;

/// What a function makes, and which functions of the workflow read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How large, before the request's own factor.
    pub size: Bytes,
    /// By place in [`Workflow::functions`]: all later than the one that makes it.
    pub takers: Vec<usize>,
}

/// A function on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: &'static str,
    /// How long it computes, on a V100.
    pub compute: Duration,
    /// What it loads from the host.
    pub loads: Bytes,
    /// What it makes for others.
    pub outputs: Vec<Output>,
    /// What it gives back to the host.
    pub response: Bytes,
    /// In how many of a hundred requests it runs: less than all where it is conditional. Only what
    /// nobody waits for may be.
    pub runs: u32,
}

/// A workflow: a graph of functions, those that make something before those that read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workflow {
    /// Its name.
    pub name: &'static str,
    /// What its CPU function takes before anything is on a GPU.
    pub decode: Duration,
    /// Its GPU functions.
    pub functions: Vec<Function>,
}

impl Workflow {
    /// What passes between functions: maker, taker, size.
    pub fn edges(&self) -> impl Iterator<Item = (usize, usize, Bytes)> {
        self.functions.iter().enumerate().flat_map(|(from, function)| {
            function
                .outputs
                .iter()
                .flat_map(move |output| output.takers.iter().map(move |&to| (from, to, output.size)))
        })
    }

    /// What a function reads of others: maker, and which of its outputs.
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

fn function(name: &'static str, compute_ms: f64, loads: u64) -> Function {
    let compute = Duration::from_secs_f64(compute_ms / 1e3);
    Function { name, compute, loads: mb(loads), outputs: Vec::new(), response: Bytes::ZERO, runs: 100 }
}

impl Function {
    fn gives(mut self, megabytes: u64, takers: &[usize]) -> Self {
        self.outputs.push(Output { size: mb(megabytes), takers: takers.to_vec() });
        self
    }

    fn answers(self, response: Bytes) -> Self {
        Self { response, ..self }
    }

    fn in_percent(self, runs: u32) -> Self {
        Self { runs, ..self }
    }
}

fn workflow(name: &'static str, decode_ms: u64, functions: Vec<Function>) -> Workflow {
    Workflow { name, decode: Duration::from_millis(decode_ms), functions }
}

/// Traffic monitoring: what a detector finds goes to two recognisers, if it finds any.
#[must_use]
pub fn traffic() -> Workflow {
    let functions = vec![
        function("preprocess", 3.0, 50).gives(60, &[1]),
        function("yolo-det", 9.0, 0).gives(25, &[2]).gives(30, &[3]),
        function("resnet-people", 5.0, 0).answers(SMALL).in_percent(85),
        function("resnet-cars", 5.0, 0).answers(SMALL).in_percent(85),
    ];
    workflow("traffic", 2, functions)
}

/// Auto-driving: a sequence, whose frames go back to the host.
#[must_use]
pub fn driving() -> Workflow {
    let functions = vec![
        function("denoise", 5.0, 50).gives(55, &[1]),
        function("yolo-seg", 10.0, 0).gives(55, &[2]),
        function("blur", 5.0, 0).answers(mb(50)),
    ];
    workflow("driving", 2, functions)
}

/// Video editing: chunks in parallel, and one that takes all of them.
#[must_use]
pub fn video() -> Workflow {
    let face = || function("yolo-face", 10.0, 60).gives(60, &[3]);
    let functions = vec![face(), face(), face(), function("resnet", 5.0, 0).answers(mb(40))];
    workflow("video", 2, functions)
}

/// Image editing: one output that two models take.
#[must_use]
pub fn image() -> Workflow {
    let functions = vec![
        function("denoise", 4.0, 40).gives(45, &[1, 2]),
        function("resnet", 6.0, 0).answers(SMALL),
        function("alexnet", 4.0, 0).answers(SMALL),
    ];
    workflow("image", 1, functions)
}

/// Social media: text that is found in a picture is read.
#[must_use]
pub fn social() -> Workflow {
    let functions = vec![
        function("preprocess", 2.0, 30).gives(35, &[1]),
        function("ocr", 7.0, 0).gives(10, &[2]).answers(SMALL),
        function("bert", 4.0, 0).answers(SMALL).in_percent(90),
    ];
    workflow("social", 1, functions)
}

/// Yelp: two models in sequence, with embeddings between them.
#[must_use]
pub fn yelp() -> Workflow {
    let functions =
        vec![function("bert-filter", 4.5, 16).gives(32, &[1]), function("bert-reply", 4.5, 0).answers(SMALL)];
    workflow("yelp", 0, functions)
}

/// All six, in the order of the table.
#[must_use]
pub fn all() -> Vec<Workflow> {
    vec![traffic(), driving(), video(), image(), social(), yelp()]
}
