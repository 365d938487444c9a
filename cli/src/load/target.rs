//! The server under load, its protocol, and its model.

use millrace_client::Address;

use crate::config::Config;
use crate::failure::CommandFailure;
use crate::load::args::Args;
use crate::target::model_name;

/// A protocol of the server under load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Grpc,
    Http,
}

/// A model on a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LoadTarget {
    pub(super) protocol: Protocol,
    /// The addresses of the server's endpoints, over which the connections are spread.
    pub(super) addresses: Vec<Address>,
    pub(super) model: String,
    pub(super) version: String,
    pub(super) tenant: String,
}

impl LoadTarget {
    pub(super) fn of(args: &Args, config: &Config) -> Result<Self, CommandFailure> {
        let positional_url = args.target.as_deref().filter(|target| target.contains("://"));
        let name = args.target.as_deref().filter(|target| !target.contains("://"));
        let (protocol, addresses) = match (args.url.as_deref(), positional_url) {
            (Some(_), Some(_)) => {
                return Err(CommandFailure::usage(
                    "two URLs are given: write one, as an argument or with --url",
                ));
            }
            (Some(url), None) | (None, Some(url)) => {
                let (protocol, address) = read_url(url)?;
                (protocol, vec![address])
            }
            (None, None) => (Protocol::Grpc, config.endpoints.clone()),
        };
        if protocol == Protocol::Grpc && args.http_json {
            return Err(CommandFailure::usage("--http-json needs an http:// URL"));
        }
        let model = match (name, args.model.as_deref()) {
            (Some(_), Some(_)) => {
                return Err(CommandFailure::usage(
                    "two models are given: write one, as an argument or with --model",
                ));
            }
            // Discard the kind: another vendor's server has no admin API that knows kinds.
            (Some(name), None) | (None, Some(name)) => model_name(name)?.1,
            (None, None) => {
                return Err(CommandFailure::usage("no model is given")
                    .hint("name the model: millrace load URL --model NAME"));
            }
        };
        Ok(Self {
            protocol,
            addresses,
            model: model.to_owned(),
            version: args.model_version.clone(),
            tenant: config.tenant.to_string(),
        })
    }

    /// Returns all addresses as text.
    pub(super) fn names(&self) -> String {
        self.addresses.iter().map(Address::authority).collect::<Vec<_>>().join(",")
    }
}

fn read_url(url: &str) -> Result<(Protocol, Address), CommandFailure> {
    let protocol = match url.split_once("://").map(|(scheme, _)| scheme) {
        Some("grpc") => Protocol::Grpc,
        Some("http") => Protocol::Http,
        _ => {
            return Err(CommandFailure::usage(format!("{url:?} is not a server's URL"))
                .hint("write grpc://HOST:PORT or http://HOST:PORT"));
        }
    };
    let address = url.parse().map_err(|error| CommandFailure::usage(format!("{error}")))?;
    Ok((protocol, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};

    fn target(line: &str) -> Result<LoadTarget, CommandFailure> {
        let cli =
            <Cli as clap::Parser>::try_parse_from(["millrace", "load"].into_iter().chain(line.split(' ')))
                .map_err(|error| CommandFailure::usage(error.to_string()))?;
        let Command::Load(args) = cli.command else { panic!("not load") };
        // Do not load this process's settings: other tests change its environment.
        LoadTarget::of(&args, &crate::config::Config::empty())
    }

    #[test]
    fn a_name_selects_a_function_and_a_url_selects_any_server() {
        let found = target("function/mlp").unwrap();
        assert_eq!((found.protocol, found.model.as_str()), (Protocol::Grpc, "mlp"));
        for text in ["workflow/traffic", "wf/traffic", "fn/traffic"] {
            assert_eq!(target(text).unwrap().model, "traffic", "{text}");
        }
        for line in ["http://h:1 --model mlp", "--url http://h:1 --model mlp", "mlp --url http://h:1"] {
            let found = target(line).unwrap();
            assert_eq!((found.protocol, found.names()), (Protocol::Http, "h:1".into()), "{line}");
            assert_eq!(found.model, "mlp");
        }
    }

    #[test]
    fn conflicting_or_missing_arguments_are_refused() {
        for line in [
            "http://h:1",
            "ftp://h:1 --model m",
            "grpc://h --model m",
            "http://h:1 --url http://h:2 --model m",
            "mlp --model mlp",
            "mlp --http-json",
            "mlp --rate 0",
            "mlp --rate 5 --concurrency 2",
            "mlp --arrival uniform",
            "mlp --concurrency 0",
            "mlp --requests 5 --duration 1s",
            "mlp --sequence-length 0",
            "mlp --sequence-length 4 --rate 5",
        ] {
            assert!(target(line).is_err(), "{line}");
        }
    }
}
