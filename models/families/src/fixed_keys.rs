//! Keys that transformers' code of a family does not read, or reads only in part. Its routing is the same whatever they
//! say.

use model_runtime::config::{Config, ConfigError, limits};

/// Checks that a config does not require another routing than its family has: biased, renormalised, without a scale,
/// with scores by this `scoring_func`.
///
/// # Errors
/// A key with another meaning, or a value of another type.
pub(crate) fn check_biased_routing(config: &Config, scoring: &str) -> Result<(), ConfigError> {
    check_fixed_strings(config, &[("topk_method", "noaux_tc"), ("scoring_func", scoring)])?;
    let switches =
        ["norm_topk_prob", "use_routing_bias", "moe_router_use_correction_bias", "e_score_correction_bias"];
    for key in switches {
        if !config.bool_or(&[key], true)? {
            return Err(
                config.unsupported(format!("{key} false"), "; the routing of this family has it true")
            );
        }
    }
    check_unscaled(config)
}

/// Checks that a config does not require another routing than the best experts of a softmax without a scale.
///
/// # Errors
/// A key with another meaning, or a value of another type.
pub(crate) fn check_softmax_routing(config: &Config) -> Result<(), ConfigError> {
    check_fixed_strings(config, &[("topk_method", "greedy"), ("scoring_func", "softmax")])?;
    check_unscaled(config)
}

fn check_unscaled(config: &Config) -> Result<(), ConfigError> {
    let scale = config.float_or(&["routed_scaling_factor"], 1.0)?;
    if scale != 1.0 {
        let advice = "; the weights of the experts of this family are not scaled";
        return Err(config.unsupported(format!("routed_scaling_factor {scale}"), advice));
    }
    Ok(())
}

/// Refuses a window. The attention of the family has none, but transformers would give one to the cache with which it
/// generates.
///
/// # Errors
/// The config has a `sliding_window`.
pub(crate) fn check_no_window(config: &Config) -> Result<(), ConfigError> {
    match config.opt_size(&["sliding_window"], limits::POSITIONS)? {
        Some(window) => {
            let advice = "; the attention of this family has no window";
            Err(config.unsupported(format!("sliding_window {window}"), advice))
        }
        None => Ok(()),
    }
}

/// Checks that a config does not require another choice of experts than DeepSeek-V3's. transformers' code of such a
/// family always makes this choice, and reads neither key.
///
/// # Errors
/// A `topk_method` or a `scoring_func` for another routing.
pub(crate) fn check_noaux_routing(config: &Config) -> Result<(), ConfigError> {
    check_fixed_strings(config, &[("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")])
}

/// Checks that these keys have the values of the family, if they are present.
///
/// # Errors
/// A key with another value.
pub(crate) fn check_fixed_strings(config: &Config, fixed: &[(&str, &str)]) -> Result<(), ConfigError> {
    for (key, only) in fixed {
        if let Some(other) = config.opt_string(&[key])?.filter(|value| value != only) {
            let advice = format!("; this family runs with {key} {only:?} alone");
            return Err(config.unsupported(format!("{key} {other:?}"), &advice));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_routing_is_refused_by_the_name_of_its_key() {
        let check =
            |text: &str| check_biased_routing(&Config::parse(text, "config.json").unwrap(), "sigmoid");
        check(r#"{"scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 1.0}"#)
            .unwrap();
        for (key, value) in [
            ("scoring_func", r#""softmax""#),
            ("topk_method", r#""greedy""#),
            ("norm_topk_prob", "false"),
            ("e_score_correction_bias", "false"),
            ("routed_scaling_factor", "2.5"),
        ] {
            let error = check(&format!(r#"{{"{key}": {value}}}"#)).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn a_softmax_has_no_scale_and_attention_no_window() {
        let config = |text: &str| Config::parse(text, "config.json").unwrap();
        check_softmax_routing(&config(r#"{"scoring_func": "softmax", "routed_scaling_factor": 1}"#)).unwrap();
        for text in [
            r#"{"scoring_func": "sigmoid"}"#,
            r#"{"topk_method": "noaux_tc"}"#,
            r#"{"routed_scaling_factor": 2}"#,
        ] {
            check_softmax_routing(&config(text)).unwrap_err();
        }
        check_no_window(&config(r#"{"sliding_window": null}"#)).unwrap();
        let error = check_no_window(&config(r#"{"sliding_window": 4}"#)).unwrap_err().to_string();
        assert!(error.contains("sliding_window 4"), "{error}");
    }
}
