//! Keys about routing that transformers' code of a family does not read: it computes one routing whatever they say.

use model_runtime::config::{Config, ConfigError};

/// Refuses a config that asks for another routing than that of its family: biased, renormalised, without a scale, its scores
/// by this `scoring_func`.
///
/// # Errors
/// A key that says otherwise, or has a value of another type.
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
    let scale = config.float_or(&["routed_scaling_factor"], 1.0)?;
    if scale != 1.0 {
        let advice = "; the weights of the experts of this family are not scaled";
        return Err(config.unsupported(format!("routed_scaling_factor {scale}"), advice));
    }
    Ok(())
}

/// Refuses other values of these keys than those that the family has.
///
/// # Errors
/// Another value.
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
}
