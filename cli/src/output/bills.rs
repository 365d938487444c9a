//! Bills for people and programs: a line for each function, a line for each of several tenants, and
//! a line for the total.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_client::messages as wire;
use millrace_types::manifest::API_VERSION;
use serde::Serialize;

use crate::output::table::{TextTable, col, wide};
use crate::output::text::non_empty;

const HOUR_S: f64 = 3_600.0;

/// The price of a GPU hour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Price(f64);

/// The error of a malformed price.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a price is a number of at least 0, such as 2.49")]
pub(crate) struct NoPrice;

impl FromStr for Price {
    type Err = NoPrice;
    fn from_str(text: &str) -> Result<Self, NoPrice> {
        let price = text.parse().map_err(|_| NoPrice)?;
        if f64::is_finite(price) && price >= 0.0 { Ok(Self(price)) } else { Err(NoPrice) }
    }
}

impl Price {
    fn of(self, charge: Duration) -> f64 {
        charge.as_secs_f64() / HOUR_S * self.0
    }
}

/// The bills of a listing.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Billing {
    api_version: &'static str,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    price_per_gpu_hour: Option<f64>,
    items: Vec<Bill>,
    tenants: Vec<TenantBill>,
    total: Amount,
}

#[derive(Debug, Serialize)]
struct Bill {
    /// The tenant. `None` for tenants that the cluster no longer distinguishes.
    tenant: Option<String>,
    /// The function. `None` for functions that the cluster no longer remembers.
    function: Option<String>,
    deleted: bool,
    #[serde(flatten)]
    amount: Amount,
}

#[derive(Debug, Serialize)]
struct TenantBill {
    tenant: Option<String>,
    #[serde(flatten)]
    amount: Amount,
}

#[derive(Debug, Default, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Amount {
    requests: u64,
    #[serde(rename = "busySeconds", serialize_with = "seconds")]
    busy: Duration,
    #[serde(rename = "idleSeconds", serialize_with = "seconds")]
    idle: Duration,
    #[serde(rename = "chargeGpuSeconds", serialize_with = "seconds")]
    charge: Duration,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
}

fn seconds<S: serde::Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(span.as_secs_f64())
}

impl Amount {
    fn of(bill: &wire::Bill, price: Option<Price>) -> Self {
        let span = |wire: &Option<_>| {
            wire.and_then(|span: prost_types::Duration| Duration::try_from(span).ok()).unwrap_or_default()
        };
        let requests = bill.requests;
        Self {
            requests,
            busy: span(&bill.busy),
            idle: span(&bill.idle),
            charge: span(&bill.charge),
            cost: None,
        }
        .priced(price)
    }

    /// Returns the sum of the amounts. The sum is priced as a whole, so the cost is rounded only
    /// once.
    fn sum<'a>(amounts: impl Iterator<Item = &'a Self>, price: Option<Price>) -> Self {
        let sum = amounts.fold(Self::default(), |sum, it| Self {
            requests: sum.requests.saturating_add(it.requests),
            busy: sum.busy.saturating_add(it.busy),
            idle: sum.idle.saturating_add(it.idle),
            charge: sum.charge.saturating_add(it.charge),
            cost: None,
        });
        sum.priced(price)
    }

    fn priced(self, price: Option<Price>) -> Self {
        Self { cost: price.map(|price| price.of(self.charge)), ..self }
    }

    fn cells(&self) -> [String; 5] {
        [
            self.requests.to_string(),
            in_seconds(self.busy),
            in_seconds(self.idle),
            in_seconds(self.charge),
            self.cost.map(|cost| format!("{cost:.4}")).unwrap_or_default(),
        ]
    }
}

/// Formats a bill's time in seconds with three decimals, or with four if the time has a finer part.
/// All times of a bill therefore align and add up.
fn in_seconds(span: Duration) -> String {
    let finer = !span.subsec_micros().is_multiple_of(1_000);
    if finer { format!("{:.4}s", span.as_secs_f64()) } else { format!("{:.3}s", span.as_secs_f64()) }
}

impl Billing {
    pub(crate) fn new(bills: Vec<wire::Bill>, price: Option<Price>) -> Self {
        let items: Vec<_> = bills
            .into_iter()
            .map(|bill| Bill {
                amount: Amount::of(&bill, price),
                deleted: bill.deleted,
                tenant: non_empty(bill.tenant),
                function: non_empty(bill.function),
            })
            .collect();
        let tenants = items.chunk_by(|a, b| a.tenant == b.tenant).map(|bills| TenantBill {
            tenant: bills.first().and_then(|bill| bill.tenant.clone()),
            amount: Amount::sum(bills.iter().map(|bill| &bill.amount), price),
        });
        Self {
            api_version: API_VERSION,
            kind: "Billing",
            price_per_gpu_hour: price.map(|Price(price)| price),
            tenants: tenants.collect(),
            total: Amount::sum(items.iter().map(|bill| &bill.amount), price),
            items,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(crate) fn table(&self) -> TextTable {
        let cost = if self.price_per_gpu_hour.is_some() { col("COST") } else { wide("COST") };
        let mut table = TextTable::new([
            col("TENANT"),
            col("FUNCTION"),
            col("REQUESTS"),
            col("GPU-TIME"),
            col("IDLE"),
            col("CHARGE"),
            cost,
        ]);
        let mut row = |tenant: &dyn fmt::Display, function: &dyn fmt::Display, amount: &Amount| {
            let [requests, busy, idle, charge, cost] = amount.cells();
            table.row([tenant.to_string(), function.to_string(), requests, busy, idle, charge, cost]);
        };
        let mut items = self.items.as_slice();
        for of_tenant in &self.tenants {
            let count = items.iter().take_while(|bill| bill.tenant == of_tenant.tenant).count();
            let (bills, rest) = items.split_at(count);
            items = rest;
            let tenant = of_tenant.tenant.as_deref().unwrap_or("(forgotten)");
            for bill in bills {
                let function = match (&bill.function, bill.deleted) {
                    (None, _) => "(forgotten)".to_owned(),
                    (Some(name), true) => format!("{name} (deleted)"),
                    (Some(name), false) => name.clone(),
                };
                row(&tenant, &function, &bill.amount);
            }
            if self.tenants.len() > 1 && bills.len() > 1 {
                row(&tenant, &"(all)", &of_tenant.amount);
            }
        }
        if self.items.len() > 1 {
            row(&"TOTAL", &"", &self.total);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ListFormat;

    fn bill(tenant: &str, function: &str, requests: u64, busy_ms: u64, idle_ms: u64) -> wire::Bill {
        let span = |us: u64| prost_types::Duration::try_from(Duration::from_micros(us)).ok();
        wire::Bill {
            tenant: tenant.into(),
            function: function.into(),
            requests,
            busy: span(busy_ms * 1_000),
            idle: span(idle_ms * 1_000),
            charge: span(busy_ms * 1_000 + idle_ms * 100),
            deleted: function.is_empty() || function == "old",
        }
    }

    fn bills() -> Vec<wire::Bill> {
        vec![bill("a", "f", 3, 36_000, 1), bill("b", "", 1, 5, 0), bill("b", "old", 2, 7, 10)]
    }

    #[test]
    fn a_listing_has_a_line_for_each_function_each_tenant_and_the_total() {
        let expected = "\
TENANT   FUNCTION        REQUESTS   GPU-TIME   IDLE     CHARGE
a        f               3          36.000s    0.001s   36.0001s
b        (forgotten)     1          0.005s     0.000s   0.005s
b        old (deleted)   2          0.007s     0.010s   0.008s
b        (all)           3          0.012s     0.010s   0.013s
TOTAL    -               6          36.012s    0.011s   36.0131s
";
        assert_eq!(Billing::new(bills(), None).table().render(ListFormat::Table), expected);
    }

    #[test]
    fn a_price_converts_charges_to_costs() {
        let billing = Billing::new(bills(), Some("100".parse().unwrap()));
        assert_eq!(billing.total.cost.map(|cost| format!("{cost:.4}")).as_deref(), Some("1.0004"));
        assert!(billing.table().render(ListFormat::Table).contains("36.0131s   1.0004\n"));
        for text in ["", "x", "-1", "inf", "NaN"] {
            assert_eq!(text.parse::<Price>(), Err(NoPrice), "{text}");
        }
    }

    #[test]
    fn a_single_function_has_no_total_line() {
        let billing = Billing::new(vec![bill("a", "f", 1, 2, 0)], None);
        let expected = "TENANT   FUNCTION   REQUESTS   GPU-TIME   IDLE     CHARGE\na        f          1          0.002s     0.000s   0.002s\n";
        assert_eq!(billing.table().render(ListFormat::Table), expected);
    }
}
