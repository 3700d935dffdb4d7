"""Recipes: one typed, strict file for a whole experiment, and the ones shipped with the package."""

from regraft.recipes.load import dump_recipe, load_recipe, shipped
from regraft.recipes.schema import Recipe
from regraft.recipes.selector import resolve_layers

__all__ = ["Recipe", "dump_recipe", "load_recipe", "resolve_layers", "shipped"]
