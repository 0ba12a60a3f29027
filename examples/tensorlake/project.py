"""A small project with flaws in it, for the analyses of the swarm to find."""

FILES = {
    "shop/__init__.py": "",
    "shop/cart.py": """import os
import json
import sys


class Cart:
    def __init__(self):
        self.items = []

    def add(self, item, price, amount = 1):
        self.items.append((item,price,amount))

    def total(self):
        total = 0
        for item, price, amount in self.items:
            total += price*amount
        unused = total
        return total
""",
    "shop/discount.py": """def discount(customer, cart, day, coupon, season):
    if customer == "new":
        if cart > 100:
            if day == "monday":
                return 20
            elif day == "friday":
                return 15
            elif coupon:
                return 12
            else:
                return 10
        elif coupon == "WELCOME":
            return 9
        elif season == "winter":
            return 8
    elif customer == "old":
        if season == "summer" and cart > 50:
            return 7
        if coupon or day == "sunday":
            return 6
        for level in (1000, 500, 200):
            if cart > level:
                return level / 100
    return 0
""",
    "shop/orders.py": """import subprocess


def load(text):
    # TODO: this trusts whoever wrote the text
    return eval(text)


def archive(path):
    # FIXME: a path with a blank breaks this
    subprocess.call("tar czf orders.tgz " + path, shell=True)


def find(orders, number):
    try:
        return orders[number]
    except:
        return undefined_order
""",
    "shop/report.py": """def report(orders):
    lines = []
    for order in orders:
        lines.append("%s: %s pieces at a price of %s each, which makes %s altogether, thank you" % (order.name, order.amount, order.price, order.amount * order.price))
    return lines


def untold(orders):
    return [order for order in orders if not order.told]
""",
}
