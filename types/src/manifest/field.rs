//! Parsing and checks of the fields that documents of several kinds have.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::function::{DEFAULT_PERCENTILE, DEFAULT_TIMEOUT, Slo};
use crate::ids::{FunctionKey, FunctionName, NameError, TenantName};

/// The path of a field, and the fault of its value.
pub(super) type FieldFault = (&'static str, String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Metadata {
    pub(super) name: String,
    tenant: Option<String>,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
    // Fields that the server adds. They are accepted and ignored, so that printed documents can be
    // applied.
    #[serde(rename = "generation")]
    _generation: Option<IgnoredAny>,
    #[serde(rename = "resourceVersion")]
    _resource_version: Option<IgnoredAny>,
    #[serde(rename = "createdAt")]
    _created_at: Option<IgnoredAny>,
    #[serde(rename = "updatedAt")]
    _updated_at: Option<IgnoredAny>,
    #[serde(rename = "updatedBy")]
    _updated_by: Option<IgnoredAny>,
}

impl Metadata {
    pub(super) fn key(&self) -> Result<FunctionKey, FieldFault> {
        let problem = |e: NameError| ("metadata", e.to_string());
        let tenant = self.tenant.as_deref().map_or(Ok(TenantName::default()), TenantName::new);
        Ok(FunctionKey {
            tenant: tenant.map_err(problem)?,
            name: FunctionName::new(&self.name).map_err(problem)?,
        })
    }

    /// Refuses the fields that only functions and workflows have.
    pub(super) fn check_bare(&self) -> Result<(), FieldFault> {
        let problem = "only functions and workflows have this field: leave it out".to_owned();
        match (&self.tenant, self.labels.is_empty()) {
            (None, true) => Ok(()),
            (Some(_), _) => Err(("metadata.tenant", problem)),
            (None, false) => Err(("metadata.labels", problem)),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SloText {
    deadline: String,
    percentile: Option<f64>,
}

impl SloText {
    pub(super) fn check(self) -> Result<Slo, FieldFault> {
        Ok(Slo {
            deadline: duration("spec.slo.deadline", &self.deadline)?,
            percentile: self.percentile.unwrap_or(DEFAULT_PERCENTILE),
        })
    }
}

pub(super) fn timeout(text: Option<String>) -> Result<Duration, FieldFault> {
    text.map_or(Ok(DEFAULT_TIMEOUT), |text| duration("spec.timeout", &text))
}

pub(super) fn duration(field: &'static str, text: &str) -> Result<Duration, FieldFault> {
    humantime::parse_duration(text).map_err(|_| {
        (field, format!("{text:?} is not a duration: write a number with ms, s, m or h, such as 50ms or 2s"))
    })
}
