//! Popularity by Zipf's law: the k-th most popular of n functions is requested in proportion to k^-s.

/// Returns the shares of `count` functions at an exponent, most popular first. The shares add up to 1.
#[must_use]
pub fn shares(count: usize, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=count).map(|rank| (rank as f64).powf(-exponent)).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Returns the exponent at which the `top` most popular of `count` functions have this share of all requests.
/// Returns 0 if they have a larger share even when all functions are equally popular.
#[must_use]
pub fn exponent(count: usize, top: usize, share: f64) -> f64 {
    let share_at = |exponent: f64| shares(count, exponent).iter().take(top).sum::<f64>();
    if share_at(0.0) >= share {
        return 0.0;
    }
    let mut low = 0.0;
    let mut high = 16.0;
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if share_at(middle) < share { low = middle } else { high = middle }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_functions_have_the_stated_share() {
        let check = |count, top, share: f64| {
            let got: f64 = shares(count, exponent(count, top, share)).iter().take(top).sum();
            assert!((got - share).abs() < 1e-9, "{got} instead of {share}");
        };
        check(46_413, 15, 0.56);
        check(35, 15, 0.56);
        assert_eq!(exponent(25, 15, 0.56), 0.0, "15 of 25 have 60% if all are equally popular");
    }
}
