//! The flags of every verb, which set settings.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use millrace_client::Address;
use millrace_types::TenantName;
use serde::{Deserialize, Serialize};

/// The flags of every verb.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The controllers to call, separated by commas, in the order in which to try them; MILLRACE_ENDPOINTS
    /// sets them too [default: 127.0.0.1:8080].
    #[arg(alias = "endpoints", short, long, global = true, value_delimiter = ',', value_name = "HOST:PORT")]
    pub(crate) endpoint: Vec<Address>,
    /// The tenant of the functions and workflows [default: default].
    #[arg(short = 'n', long, global = true, value_name = "NAME")]
    pub(crate) tenant: Option<TenantName>,
    /// A settings file to read in place of the default file.
    #[arg(long, global = true, value_name = "FILE", env = "MILLRACE_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// The log filter for stderr: a level, or directives such as millrace_worker=debug.
    #[arg(long, global = true, value_name = "FILTER")]
    pub(crate) log: Option<String>,
    /// The format of log lines [default: text].
    #[arg(long, global = true, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) log_format: Option<LogFormat>,
    /// The OTLP gRPC endpoint that receives traces, such as http://127.0.0.1:4317; without an
    /// endpoint, no traces are sent.
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,
    /// The share of new traces to record, from 0 to 1; a trace that began in another process keeps
    /// that process's decision [default: 1].
    #[arg(long, global = true, value_name = "SHARE")]
    pub(crate) trace_sample: Option<f64>,
    /// The number of recent spans that a controller or worker keeps in memory for 'millrace trace',
    /// about 1 KiB each; a request has a dozen [default: 0].
    #[arg(long, global = true, value_name = "N")]
    pub(crate) keep_spans: Option<u32>,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// Text lines for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
