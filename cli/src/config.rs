//! The settings in layers: defaults, then a TOML file, then the environment, then flags. An unknown
//! key is refused in every layer.

mod flags;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use figment::Figment;
use figment::providers::{Env, Format as _, Serialized, Toml};
use millrace_client::Address;
use millrace_controller::ObjectStoreUrl;
use millrace_types::TenantName;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

pub(crate) use self::flags::{Global, LogFormat};
use crate::failure::CommandFailure;

/// The endpoint if no layer names an endpoint.
const DEFAULT_ENDPOINT: &str = "127.0.0.1:8080";
const ENV_PREFIX: &str = "MILLRACE_";
/// The largest number of spans to keep in memory, about 1 KiB each.
const KEEP_SPANS_MAX: u32 = 1_000_000;

/// The merged settings.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    /// The controllers to call, in the order in which to try them.
    #[serde(deserialize_with = "addresses")]
    pub(crate) endpoints: Vec<Address>,
    /// The tenant of the functions and workflows.
    pub(crate) tenant: TenantName,
    /// The log filter. `None` selects the verb's default.
    pub(crate) log: Option<String>,
    /// The format of log lines.
    pub(crate) log_format: LogFormat,
    /// The OTLP endpoint that receives traces.
    pub(crate) otlp_endpoint: Option<String>,
    /// The share of new traces to record, from 0 to 1.
    #[serde(deserialize_with = "share")]
    pub(crate) trace_sample: f64,
    /// The number of spans to keep in memory. `None` keeps none.
    #[serde(default, deserialize_with = "spans")]
    pub(crate) keep_spans: Option<NonZeroU32>,
    /// The storage that controllers share for model files. `None` keeps them on each controller's
    /// own disk.
    #[serde(default, deserialize_with = "place")]
    pub(crate) artifacts: Option<ObjectStoreUrl>,
}

#[cfg(test)]
impl Config {
    /// Returns settings without endpoints, and with the defaults otherwise.
    pub(crate) fn empty() -> Self {
        Self {
            endpoints: Vec::new(),
            tenant: TenantName::default(),
            log: None,
            log_format: LogFormat::Text,
            otlp_endpoint: None,
            trace_sample: 1.0,
            keep_spans: None,
            artifacts: None,
        }
    }
}

/// A layer: only the settings that the layer sets.
#[derive(Serialize, Default)]
struct ConfigLayer<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoints: Option<Vec<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,
    #[serde(skip_serializing_if = "Option::is_none")]
    otlp_endpoint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_sample: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_spans: Option<u32>,
}

/// Reads and merges all layers.
pub(crate) fn load(flags: &Global) -> Result<Config, CommandFailure> {
    let file = match &flags.config {
        Some(path) if !path.is_file() => {
            return Err(CommandFailure::usage(format!(
                "the settings file {} does not exist",
                path.display()
            ))
            .hint("name an existing file with --config, or omit --config"));
        }
        Some(path) => Some(path.clone()),
        None => usual_file().filter(|path| path.is_file()),
    };
    merge(file.as_deref(), flags)
}

fn merge(file: Option<&Path>, flags: &Global) -> Result<Config, CommandFailure> {
    let mut figment = Figment::from(Serialized::defaults(defaults()));
    if let Some(path) = file {
        figment = figment.merge(Toml::file_exact(path));
    }
    let standard = Env::raw().only(&["OTEL_EXPORTER_OTLP_ENDPOINT"]).map(|_| "otlp_endpoint".into());
    let ours = Env::prefixed(ENV_PREFIX).ignore(&["config", "data_dir"]).split("__");
    let config = figment.merge(standard).merge(ours).merge(Serialized::defaults(layer_of(flags))).extract();
    config.map_err(|error| refusal(&error))
}

fn defaults() -> ConfigLayer<'static> {
    ConfigLayer {
        endpoints: Some(vec![DEFAULT_ENDPOINT]),
        tenant: Some("default"),
        log_format: Some(LogFormat::Text),
        trace_sample: Some(1.0),
        ..ConfigLayer::default()
    }
}

fn layer_of(flags: &Global) -> ConfigLayer<'_> {
    let endpoints: Vec<_> = flags.endpoint.iter().map(Address::authority).collect();
    ConfigLayer {
        endpoints: (!endpoints.is_empty()).then_some(endpoints),
        tenant: flags.tenant.as_ref().map(TenantName::as_str),
        log: flags.log.as_deref(),
        log_format: flags.log_format,
        otlp_endpoint: flags.otlp_endpoint.as_deref(),
        trace_sample: flags.trace_sample,
        keep_spans: flags.keep_spans,
    }
}

fn refusal(error: &figment::Error) -> CommandFailure {
    let problems: Vec<_> = error.clone().into_iter().map(|error| error.to_string()).collect();
    CommandFailure::usage(format!("settings: {}", problems.join("; ")))
        .hint("see 'millrace --help' for the settings")
}

fn usual_file() -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_CONFIG_HOME")
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")))?;
    Some(folder.join("millrace/config.toml"))
}

/// Reads a list of endpoints, or a single text with commas, as the environment has it.
fn addresses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Address>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an endpoint host:port, or a list of them")]
    enum EndpointsText {
        Text(String),
        List(Vec<String>),
    }
    let written = match EndpointsText::deserialize(deserializer)? {
        EndpointsText::Text(text) => text.split(',').map(str::to_owned).collect(),
        EndpointsText::List(list) => list,
    };
    if written.is_empty() {
        return Err(D::Error::custom("no endpoint in the list: name at least one"));
    }
    written.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
}

/// Reads a share from 0 to 1.
fn share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let share = f64::deserialize(deserializer)?;
    let refused =
        || D::Error::custom(format!("trace_sample {share} is out of range: write a number from 0 to 1"));
    (0.0..=1.0).contains(&share).then_some(share).ok_or_else(refused)
}

/// Reads the number of spans to keep, 0 for none.
fn spans<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NonZeroU32>, D::Error> {
    let spans = u32::deserialize(deserializer)?;
    if spans > KEEP_SPANS_MAX {
        return Err(D::Error::custom(format!(
            "keep_spans {spans} is too large: write at most {KEEP_SPANS_MAX}"
        )));
    }
    Ok(NonZeroU32::new(spans))
}

/// Reads the storage for model files from its text.
fn place<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ObjectStoreUrl>, D::Error> {
    let written = Option::<String>::deserialize(deserializer)?;
    written.map(|text| text.parse().map_err(D::Error::custom)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use figment::Jail;

    // The jail's error type is large, but figment prescribes it.
    #[allow(clippy::result_large_err, reason = "figment's signature")]
    fn check(file: Option<&str>, env: &[(&str, &str)], args: &[&str]) -> Result<Config, CommandFailure> {
        let mut outcome = Err(CommandFailure::failed("the jail did not run"));
        Jail::expect_with(|jail| {
            jail.clear_env();
            for (key, value) in env {
                jail.set_env(key, value);
            }
            let path =
                file.map(|text| jail.create_file("config.toml", text).map(|_| "config.toml")).transpose()?;
            let line = ["millrace", "ps"].iter().chain(args);
            let cli = <crate::args::Cli as clap::Parser>::parse_from(line);
            outcome = merge(path.map(Path::new), &cli.global);
            Ok(())
        });
        outcome
    }

    fn endpoints(config: &Config) -> Vec<&str> {
        config.endpoints.iter().map(Address::authority).collect()
    }

    #[test]
    fn a_flag_beats_the_environment_which_beats_the_file() {
        let file = Some("endpoints = [\"f:1\"]\ntenant = \"file\"\nlog = \"info\"");
        let env = [("MILLRACE_ENDPOINTS", "e:1,e:2"), ("MILLRACE_TENANT", "env")];
        let config = check(file, &env, &["-n", "flag"]).unwrap();
        assert_eq!(endpoints(&config), ["e:1", "e:2"]);
        assert_eq!((config.tenant.as_str(), config.log.as_deref()), ("flag", Some("info")));
    }

    #[test]
    fn defaults_apply_without_any_layer() {
        let config = check(None, &[], &[]).unwrap();
        assert_eq!((endpoints(&config), &config.tenant), (vec![DEFAULT_ENDPOINT], &TenantName::default()));
        assert_eq!((config.log, config.log_format, config.otlp_endpoint), (None, LogFormat::Text, None));
    }

    #[test]
    fn the_standard_variable_names_the_collector() {
        let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")];
        assert_eq!(check(None, &env, &[]).unwrap().otlp_endpoint.as_deref(), Some("http://c:4317"));
        let config = check(None, &env, &["--otlp-endpoint", "http://d:1"]).unwrap();
        assert_eq!(config.otlp_endpoint.as_deref(), Some("http://d:1"));
    }

    #[test]
    fn trace_sample_and_keep_spans_are_read_from_every_layer() {
        let said = |env: &[_], args: &[_]| {
            let config = check(Some("keep_spans = 5"), env, args).unwrap();
            (config.trace_sample, config.keep_spans.map(NonZeroU32::get))
        };
        assert_eq!(said(&[], &[]), (1.0, Some(5)));
        let env = [("MILLRACE_TRACE_SAMPLE", "0.25"), ("MILLRACE_KEEP_SPANS", "0")];
        assert_eq!(said(&env, &[]), (0.25, None));
        assert_eq!(said(&env, &["--trace-sample", "0", "--keep-spans", "9"]), (0.0, Some(9)));
        for bad in [["--trace-sample", "1.5"], ["--keep-spans", "2000000"]] {
            let refused = check(None, &[], &bad).unwrap_err().message.unwrap();
            assert!(refused.contains(bad[1]), "{refused}");
        }
    }

    #[test]
    fn artifacts_are_read_from_the_file_and_the_environment() {
        let file = Some("artifacts = \"s3://models/a\"");
        let said = |file, env: &[_]| check(file, env, &[]).unwrap().artifacts.map(|it| it.to_string());
        assert_eq!(said(file, &[]).as_deref(), Some("s3://models/a"));
        let env = [("MILLRACE_ARTIFACTS", "file:///mnt/models")];
        assert_eq!(said(file, &env).as_deref(), Some("file:///mnt/models"));
        assert_eq!(said(None, &[]), None);
    }

    #[test]
    fn variables_that_a_verb_reads_itself_are_not_settings() {
        let env = [("MILLRACE_CONFIG", "x.toml"), ("MILLRACE_DATA_DIR", "d")];
        assert!(check(None, &env, &[]).is_ok());
    }

    #[test]
    fn unknown_keys_and_bad_values_are_refused_with_their_source() {
        let refused = |file, env: &[_]| check(file, env, &[]).unwrap_err().message.unwrap();
        let message = refused(Some("endpiont = \"a:1\""), &[]);
        assert!(message.contains("endpiont") && message.contains("config.toml"), "{message}");
        let message = refused(None, &[("MILLRACE_ENDPIONTS", "a:1")]);
        assert!(message.contains("endpionts") && message.contains("MILLRACE_"), "{message}");
        let message = refused(None, &[("MILLRACE_ENDPOINTS", "nowhere")]);
        assert!(message.contains("write host:port"), "{message}");
        let message = refused(None, &[("MILLRACE_ARTIFACTS", "/mnt/models")]);
        assert!(message.contains("file:///shared/folder"), "{message}");
        let message = refused(Some("tenant = \"A B\""), &[]);
        assert!(message.contains("lower-case"), "{message}");
    }
}
